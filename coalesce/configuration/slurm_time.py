"""Time limits as Slurm writes them."""

from __future__ import annotations

import re

#: sbatch(1), --time: "minutes", "minutes:seconds", "hours:minutes:seconds", "days-hours", "days-hours:minutes" and
#: "days-hours:minutes:seconds".
_DAYS = re.compile(r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?", re.ASCII)
_HOURS = re.compile(r"((?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)", re.ASCII)
_MINUTES = re.compile(r"(?P<minutes>\d+)", re.ASCII)


def minutes(text: str) -> int | None:
    """A time limit in minutes, rounded up as Slurm does; None: it is none.

    Two numbers are minutes and seconds, in Slurm as here.

    >>> [minutes(text) for text in ("90", "4:00:00", "1-12:00:00", "2-0", "1-6:30", "30:00", "0:00:01", "4h")]
    [90, 240, 2160, 2880, 1830, 30, 1, None]
    """
    for form in (_DAYS, _HOURS, _MINUTES):
        if found := form.fullmatch(text.strip()):
            days, hours, mins, seconds = (
                int(found.groupdict().get(unit) or 0) for unit in ("days", "hours", "minutes", "seconds")
            )
            return ((days * 24 + hours) * 60 + mins) + -(-seconds // 60)
    return None
