"""``python -m coalesce``: a Hydra application that trains one sweep."""

from __future__ import annotations

import os
import sys
import warnings
from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from coalesce.configuration.command_line import adapt, hints, program_name, refuse_multirun
from coalesce.configuration.language import register_resolvers
from coalesce.errors import ConfigError, LaunchError, Problem, RunFolderError, TaskError, nearest
from coalesce.store.signals import Interrupted

if TYPE_CHECKING:
    from coalesce.configuration.hydra import Order

#: Exit codes.
DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
FULL_ERROR = "HYDRA_FULL_ERROR"


def main() -> int:
    """Run the command line.

    Returns:
        The exit code: 0, whatever became of the experiments, diverged ones included; 1 if one failed, or the run
        folder could not be written; 2 if the command or its configuration was refused, and nothing was written; and
        if a signal ended the run, that of `store.signals.EXIT_CODES`.
    """
    # the console script, unlike `python -m`, does not find modules in the folder where it is called
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    register_resolvers()
    arguments = sys.argv[1:]
    # an unknown flag is left for Hydra's own parser to refuse
    flags, _ = get_args_parser().parse_known_intermixed_args(arguments)
    shows = flags.help or flags.hydra_help or flags.cfg or flags.info or flags.shell_completion
    if not shows:
        refusal = refuse_multirun(program_name(sys.argv[0]), arguments, flags.overrides, flags.multirun)
        if refusal:
            return _refuse(refusal)
    if flags.experimental_rerun is not None:
        return _refuse("--experimental-rerun reads a pickle, which may hold any code; coalesce runs no code from data")
    # argparse, as Hydra calls it, takes overrides from one place only: they are brought together
    others = [argument for argument in arguments if argument not in flags.overrides]
    try:
        return _run_hydra([*adapt(flags.overrides), *others], flags.overrides)
    except (KeyboardInterrupt, BdbQuit) as stop:  # the latter is "quit" at a breakpoint
        print(stop if isinstance(stop, Interrupted) else "interrupted", file=sys.stderr)
        return stop.code if isinstance(stop, Interrupted) else INTERRUPTED


def conf_folder() -> Path:
    """Our configuration: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no conf/config.yaml in {package} or beside it: coalesce is not installed completely")


def _run_hydra(arguments: list[str], overrides: list[str]) -> int:
    """Let Hydra parse, compose and call `_app`; and tell a refusal of Hydra's from everything else."""
    codes: list[int] = []

    def app(config: DictConfig) -> None:
        with _environment(FULL_ERROR, full_error):
            codes.append(FAILED)
            codes[0] = _app(config)

    folder = str(conf_folder())
    before, full_error = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv = [before[0], *arguments]
    try:
        # with this set, Hydra passes its exceptions on instead of printing some of them as long tracebacks
        with _environment(FULL_ERROR, "1"):
            hydra.main(version_base="1.3", config_path=folder, config_name="config")(app)()
    except SystemExit as stop:
        if codes:
            # the user's own code ended the process; Python prints what it had to say
            raise
        # argparse refuses with 2; help, --version and the like end with 0
        return stop.code if isinstance(stop.code, int) else DONE
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        if codes or full_error == "1":
            raise
        return _refuse("\n".join(_lines(error, overrides)))
    finally:
        sys.argv = before
    return codes[0] if codes else DONE


def _app(config: DictConfig) -> int:
    from coalesce.configuration.hydra import read_order

    try:
        if config.get("resume") is not None:
            return _resume(config)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            order = read_order(config, HydraConfig.get())
        for warning in caught:
            print(f"warning: {warning.message}", file=sys.stderr)
        with _sources(order):
            return run_order(order)
    except ConfigError as error:
        return _refuse(str(error))
    except (TaskError, RunFolderError, LaunchError) as error:
        print(f"coalesce: {error}", file=sys.stderr)
        return FAILED


def _resume(config: DictConfig) -> int:
    from coalesce.running import resume

    if not isinstance(config.resume, str | int | float) or not str(config.resume).strip():
        # an empty one is what a shell makes of a variable that is not set; it would stand for the present folder
        rule = "must name a folder" if str(config.resume).strip() else "names no folder (a variable that is not set?)"
        valid = "a run folder (runs/lr_grid/<time>), or one that holds some (runs/lr_grid: its latest run)"
        seen: Any = OmegaConf.to_container(config, resolve=False)
        raise ConfigError([Problem("resume", seen["resume"], rule, valid, source="command line")])
    try:
        given: Any = OmegaConf.to_container(config, resolve=False)
        retry = given.get("retry")
        return resume(str(config.resume), HydraConfig.get(), config.get("plan") is True, retry)
    except FileNotFoundError as error:
        return _refuse(f"resume={config.resume}: {error}")


@contextmanager
def _sources(order: Order) -> Iterator[None]:
    """Tell where a value stands that turns out wrong only beside the data: the planner does not know."""
    try:
        yield
    except ConfigError as error:
        # a swept key is wrong where the sweep writes it
        keys = [f"sweep.params.{p.key}" if p.key in order.keys else p.key for p in error.problems]
        known = [replace(p, source=p.source or order.source(k)) for p, k in zip(error.problems, keys, strict=True)]
        raise ConfigError(known) from None


def run_order(order: Order) -> int:
    """Plan and run what was asked for.

    Raises:
        ConfigError: what can be known only from the data is wrong.
    """
    from coalesce.running import begin

    return begin(order)


def _refuse(text: str) -> int:
    print(f"coalesce: {text}", file=sys.stderr)
    return REFUSED


def _lines(error: Exception, overrides: list[str]) -> Iterator[str]:
    """A refusal of Hydra's, in a few lines, with the nearest name where a name is unknown."""
    from coalesce.configuration.hydra import GLOBAL
    from coalesce.experiment import KEYS

    seen = str(error).strip() or (str(error.__cause__) if error.__cause__ else type(error).__name__)
    yield seen
    if error.__cause__ is not None and str(error.__cause__).splitlines()[0] not in seen:
        yield str(error.__cause__).splitlines()[0]
    if "Could not override" in seen and "@" in seen:
        yield f"A file of one group chooses options of others only if its first line is {GLOBAL!r}."
    folder = conf_folder()
    groups = {
        path.name: [file.stem for file in sorted(path.glob("*.yaml"))] for path in folder.iterdir() if path.is_dir()
    }
    names = [*KEYS, *groups, "plan", "runs", "resume", "retry"]
    for key, _ in hints(overrides, names):
        if nearest(key, names):
            yield f"Did you mean {nearest(key, names)!r}, not {key!r}?"
    for key, option in hints(overrides, ()):
        if key in groups and option not in groups[key] and nearest(option, groups[key]):
            yield f"Did you mean {key}={nearest(option, groups[key])}?"


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.get(name)
    try:
        _set(name, value)
        yield
    finally:
        _set(name, before)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


if __name__ == "__main__":
    sys.exit(main())
