"""Where a sweep's jobs run: the launcher's settings, checked."""

from __future__ import annotations

import difflib
import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from coalesce.configuration.search import Setting, checked_setting
from coalesce.configuration.slurm_time import minutes
from coalesce.configuration.values import Kind
from coalesce.errors import ConfigError, Problem, nearest
from coalesce.launch.settings import LAUNCHERS, LauncherSettings

INT, NUMBER, TEXT = Kind("int"), Kind("float"), Kind("text")
NO_INT, NO_NUMBER, NO_TEXT = (replace(kind, optional=True) for kind in (INT, NUMBER, TEXT))
TEXTS = Kind("list", item=TEXT, as_tuple=True)
DEFAULTS = LauncherSettings()

#: Keys of every launcher that starts processes.
JOBS: Mapping[str, Setting] = {
    "jobs": Setting(DEFAULTS.jobs, NO_INT, 1),
    "experiments_per_job": Setting(DEFAULTS.experiments_per_job, NO_INT, 1),
    "cpus": Setting(DEFAULTS.cpus, NO_INT, 1),
    "retries": Setting(DEFAULTS.retries, INT, 0),
    "detach": Setting(DEFAULTS.detach, Kind("bool")),
    "poll_s": Setting(DEFAULTS.poll_s, NUMBER, 0, open_low=True),
}
#: The launchers and their keys.
KEYS: Mapping[str, Mapping[str, Setting]] = {
    "process": {},
    "local": JOBS,
    "slurm": {
        **JOBS,
        "partition": Setting(DEFAULTS.partition, NO_TEXT),
        "account": Setting(DEFAULTS.account, NO_TEXT),
        "qos": Setting(DEFAULTS.qos, NO_TEXT),
        "constraint": Setting(DEFAULTS.constraint, NO_TEXT),
        "time": Setting(DEFAULTS.time, INT, 1),
        "memory_gb": Setting(DEFAULTS.memory_gb, NO_NUMBER, 0, open_low=True),
        "gres": Setting(DEFAULTS.gres, NO_TEXT),
        # Slurm counts them in 16 bits
        # null: see `_signal_s`
        "signal_s": Setting(None, NO_INT, 1, 65535),
        "setup": Setting(DEFAULTS.setup, TEXTS),
        "python": Setting(DEFAULTS.python, NO_TEXT),
        "srun": Setting(DEFAULTS.srun, TEXTS),
    },
}
#: Options of sbatch that are not passed on, and why.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("array", "nodes", "ntasks", "ntasks_per_node"), "coalesce shares a sweep out itself: launcher.jobs"
    ),
    **dict.fromkeys(("output", "error", "open_mode"), "each job's output goes into the run folder, below jobs/"),
    "signal": "coalesce listens to a signal of its own; when it comes is launcher.signal_s",
    **dict.fromkeys(("requeue", "no_requeue"), "jobs that are ended before their time go on; see launcher.retries"),
    "job_name": "jobs are named after the sweep: sweep.name",
    "wckey": "submitit, which submits the jobs, sets it",
    **dict.fromkeys(
        ("wait", "test_only", "parsable", "quiet", "wrap", "help", "usage", "version"),
        "with it sbatch does not submit a job and tell its id",
    ),
    **dict.fromkeys(("cluster", "clusters"), "jobs are watched on the cluster that the command is given on"),
    "cpus_per_task": "it is called launcher.cpus",
}
#: How alike two names are where one is taken for the other misspelt. sbatch has options of its sites' own
#: (`--container-image`), so this is stricter than `nearest`.
ALIKE = 0.7
#: sbatch's own options that look like keys of ours.
THEIRS = ("gpus", "mincpus", "container", "cluster_constraint")
#: What sbatch takes in place of `--gres=gpu:1`.
GPUS = ("gpus", "gpus_per_node", "gpus_per_task", "gpus_per_socket")
SUBMITIT = "pip install 'coalesce[slurm]'"


def check_launcher(settings: Mapping[str, Any] | None) -> LauncherSettings:
    """Check a launcher's settings and fill in the defaults.

    Args:
        settings: ``name`` and any of its keys; of Slurm's also options of sbatch, which are passed on; None: this
            process.

    Raises:
        ConfigError: with every problem found.
    """
    given = {str(key): value for key, value in (settings or {}).items()}
    name = given.pop("name", DEFAULTS.name)
    if name not in LAUNCHERS:
        near = nearest(str(name), LAUNCHERS)
        raise ConfigError([Problem("launcher.name", name, "unknown launcher", ", ".join(LAUNCHERS), near)])
    keys = KEYS[name]
    problems: list[Problem] = []
    sbatch: dict[str, Any] = {}
    for key in [key for key in given if key not in keys]:
        value = given.pop(key)
        problems += _passed_on(key, value, sbatch) if name == "slurm" else [_unknown(key, value, name)]
    checked: dict[str, Any] = {}
    for key, setting in keys.items():
        checked[key], found = _checked(f"launcher.{key}", given.get(key, setting.default), setting)
        problems += found
    if name == "slurm" and not problems:
        checked["signal_s"] = _signal_s(checked)
        problems += _beside(checked, given, sbatch)
    if name != "process" and importlib.util.find_spec("submitit") is None:
        problems.append(Problem("launcher.name", name, "needs the package submitit, which is not installed", SUBMITIT))
    if problems:
        raise ConfigError(problems)
    return LauncherSettings(name=name, sbatch=sbatch, **checked)


def _checked(key: str, given: Any, setting: Setting) -> tuple[Any, list[Problem]]:
    if key == "launcher.time" and isinstance(given, str) and (value := minutes(given)) is not None:
        given = value
    if setting.kind is TEXTS and isinstance(given, str):
        given = [given]
    if setting.kind is NO_TEXT and isinstance(given, int) and not isinstance(given, bool):
        # accounts and partitions are called by numbers too
        given = str(given)
    value, problems = checked_setting(key, given, setting)
    valid = setting.valid
    if key == "launcher.time":
        valid = 'minutes, at least 1, or Slurm\'s "hours:minutes:seconds", "days-hours", "days-hours:minutes:seconds"'
    texts = [value] if isinstance(value, str) else value if isinstance(value, tuple) else []
    if not problems and any(isinstance(text, str) and not text.strip() for text in texts):
        problems = [Problem(key, given, "must not be empty")]
    if not problems and isinstance(value, str) and len(value.splitlines()) > 1:
        problems = [Problem(key, given, "must be one line")]
    return value, [replace(problem, valid=valid) for problem in problems]


def _unknown(key: str, value: Any, name: str) -> Problem:
    keys = KEYS[name]
    others = [f"launcher={other}" for other, theirs in KEYS.items() if key in theirs]
    rule = f"unknown key for launcher={name}" + (f" (it is one of {', '.join(others)})" if others else "")
    return Problem(f"launcher.{key}", value, rule, ", ".join(["name", *keys]), nearest(key, keys))


def _passed_on(key: str, value: Any, sbatch: dict[str, Any]) -> list[Problem]:
    """An option of sbatch, which is added to ``sbatch``; or why it is none."""
    dotted, option = f"launcher.{key}", key.replace("-", "_")
    if option in REFUSED:
        return [Problem(dotted, value, f"cannot be set: {REFUSED[option]}")]
    keys = ["name", *KEYS["slurm"]]
    near = difflib.get_close_matches(option, keys, n=1, cutoff=ALIKE)
    if near and option not in THEIRS:
        return [Problem(dotted, value, "unknown key for launcher=slurm", ", ".join(keys), near[0])]
    if not re.fullmatch(r"[a-z]\w+", option):
        # of one letter, too: submitit writes `--p=`
        return [
            Problem(dotted, value, "is no option of sbatch", "the long name of one: nice, mail_user, container-image")
        ]
    if option in sbatch:
        return [Problem(dotted, value, "is given twice", "one of - and _ between its words")]
    valid = "text, a number, true for an option without a value, or null or false to leave it out"
    if not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
        return [Problem(dotted, value, "cannot be passed to sbatch", valid)]
    if isinstance(value, str) and len(value.splitlines()) != 1:
        return [Problem(dotted, value, "cannot be passed to sbatch: it must be one line of text", valid)]
    if value is not None and value is not False:
        sbatch[option] = value
    return []


def _signal_s(checked: Mapping[str, Any]) -> int:
    """Seconds from the signal to the end of a job's time. Of a short time most is left to the job: Slurm may send the
    signal a minute early, and a job that is told before it listens is lost."""
    given: int | None = checked["signal_s"]
    return min(DEFAULTS.signal_s, 60 * checked["time"] // 4) if given is None else given


def _beside(checked: Mapping[str, Any], given: Mapping[str, Any], sbatch: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with keys that are each right by itself."""
    problems = []
    if checked["signal_s"] >= 60 * checked["time"]:
        rule = f"must be less than launcher.time, which is {60 * checked['time']} seconds"
        problems.append(Problem("launcher.signal_s", checked["signal_s"], rule, KEYS["slurm"]["signal_s"].valid))
    gres = checked["gres"]
    if gres is not None:
        for part in gres.split(","):
            kind, *rest = part.strip().split(":")
            if kind == "gpu" and rest and rest[-1].isdigit() and rest[-1] != "1":
                rule = "a job uses one GPU; more GPUs are more jobs: launcher.jobs"
                problems.append(Problem("launcher.gres", gres, rule, "gpu:1, gpu:<type>:1, …, or null"))
        for option in (option for option in GPUS if option in sbatch):
            rule = f"stands beside launcher.gres={gres}, which asks for a GPU as well"
            problems.append(Problem(f"launcher.{option}", sbatch[option], rule, "launcher.gres=null beside it"))
    return problems
