"""A Slurm on this machine, by hand.

    eval "$(python tests/cluster up FOLDER)"     # prints `export SLURM_CONF=...`, without which Slurm does not find it
    python tests/cluster down FOLDER             # ends its jobs and daemons and removes FOLDER

It needs root and Debian's packages `slurm-wlm` and `munge`; `up FOLDER --accounting` also `slurmdbd` and
`mariadb-server`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("up", "down"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd, so that sacct works")
    arguments = parser.parse_args()
    # `python FOLDER` looks for modules in FOLDER itself, which is a package of tests/
    sys.path[0] = str(Path(__file__).parents[1].absolute())
    from cluster.accounting import AccountingError
    from cluster.slurm import ClusterError, down, up

    try:
        if arguments.what == "up":
            for name, value in up(arguments.folder, arguments.accounting).environment.items():
                print(f"export {name}={shlex.quote(value)}")
        else:
            down(arguments.folder)
    except (ClusterError, AccountingError) as error:
        print(f"tests/cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
