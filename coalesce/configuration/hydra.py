"""The edge to Hydra and OmegaConf: a composed configuration in, plain dictionaries and experiments out."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from coalesce.configuration.language import read_sweep
from coalesce.configuration.launching import check_launcher
from coalesce.configuration.options import Compose
from coalesce.configuration.params import unique
from coalesce.configuration.search import ANY, check_search
from coalesce.configuration.sources import Sources, files_of
from coalesce.configuration.sweep import make_search
from coalesce.configuration.trainer import check_trainer
from coalesce.configuration.values import MISSING, Kind, coerce
from coalesce.errors import ConfigError, Problem, nearest
from coalesce.experiment import KEYS, Experiment
from coalesce.launch.settings import LauncherSettings
from coalesce.runner.plan import Trainer
from coalesce.search.base import Search
from coalesce.store.paths import check_root

#: Top-level keys that belong to no experiment.
OTHERS = ("sweep", "search", "launcher", "trainer", "plan", "runs", "resume", "retry")
#: Keys of the node ``sweep`` and their defaults.
SWEEP: dict[str, Any] = {"name": None, "params": {}, "zip": [], "limit": 10_000}
#: The line with which a file sets keys outside of its group.
GLOBAL = "# @package _global_"


@dataclass(frozen=True)
class Order:
    """Everything that a command asks for, checked.

    Args:
        name: the sweep's name.
        keys: the swept keys, dotted, in the sweep's order.
        search: what says which experiments are trained. To be told where it may keep records before it is asked.
        trainer: how they are run.
        launcher: where.
        runs: the folder that run folders are made in.
        plan_only: print the plan and stop.
        yaml: the resolved configuration, for the run folder.
        source: key → where its value stands, for problems that only the data show.
    """

    name: str
    keys: tuple[str, ...]
    search: Search
    trainer: Trainer
    launcher: LauncherSettings
    runs: Path
    plan_only: bool
    yaml: str
    source: Callable[[str], str]

    @property
    def experiments(self) -> tuple[Experiment, ...]:
        """Those that the search knows beforehand, in the sweep's order, each once: see `Search.known`."""
        return tuple(self.search.known())


def read_order(config: DictConfig, node: HydraConf) -> Order:
    """Check a composed configuration and expand its sweep. To be called while Hydra runs.

    Args:
        config: what Hydra composed.
        node: its node ``hydra``: `HydraConfig.get()`.

    Raises:
        ConfigError: with every problem found.
    """
    given = _lines(node.overrides.task)
    sources = Sources(given, node.runtime.choices, files_of(node))
    option = node.runtime.choices.get("sweep")
    order = read(config, given, sources, composer(node), option)
    _warn_without_effect(given, order.keys)
    return order


def read(
    config: DictConfig,
    given: Sequence[str],
    sources: Sources,
    compose: Compose,
    option: str | None = None,
    anew: bool = True,
) -> Order:
    """Check a configuration and expand its sweep. To be called while Hydra runs.

    Args:
        config: all of it.
        given: the overrides in it.
        sources: tells where its values stand.
        compose: makes the base for other options of groups.
        option: of the group ``sweep``.
        anew: whether a run folder will be made.

    Raises:
        ConfigError: with every problem found.
    """
    problems: list[Problem] = []
    whole = to_plain(config, problems)
    whole.pop("resume", None)
    if (retry := whole.pop("retry", None)) is not None:
        rule = "there is no run whose experiments could be trained once more"
        problems.append(Problem("retry", retry, rule, "resume=FOLDER beside it", source=sources("retry")))
    problems += sources.misread()
    base = {key: value for key, value in whole.items() if key not in OTHERS}
    valid = (*KEYS, *OTHERS)
    for key in [key for key in base if key not in KEYS]:
        problems.append(Problem(key, base.pop(key), "unknown key", ", ".join(valid), nearest(key, valid)))
    sweep = _sweep(whole.get("sweep"), option, problems)
    plan_only, found = coerce("plan", whole.get("plan", False), Kind("bool"))
    problems += found
    runs = _runs(whole.get("runs", "runs"), plan_only or not anew, problems)
    launcher = LauncherSettings()
    try:
        launcher = check_launcher(_mapping("launcher", whole.get("launcher"), problems))
    except ConfigError as error:
        problems += error.problems
    checked: Trainer | None = None
    try:
        checked = check_trainer(_mapping("trainer", whole.get("trainer"), problems))
    except ConfigError as error:
        problems += error.problems
    trainer = checked or Trainer()
    settings = ANY
    try:
        settings = check_search(_mapping("search", whole.get("search"), problems), checked)
    except ConfigError as error:
        problems += error.problems
    params, found = unique(sweep["params"], _given(given))
    problems += found
    search, keys = make_search(
        base,
        params,
        sweep["zip"],
        sweep["limit"],
        compose=compose,
        options=group_options,
        read=read_sweep(group_options, sweep["limit"]),
        source=sources,
        problems=problems,
        trainer=trainer,
        settings=settings,
    )
    text = OmegaConf.to_yaml(OmegaConf.create(whole))
    return Order(sweep["name"], keys, search, trainer, launcher, runs, plan_only, text, sources)


def to_plain(node: Any, problems: list[Problem], key: str = "") -> Any:
    """A composed configuration as plain dictionaries, interpolations resolved.

    Args:
        node: a container of OmegaConf, or a plain value.
        problems: what cannot be resolved is added here, and left out.
        key: where the node stands.
    """
    if not isinstance(node, DictConfig | ListConfig):
        return node
    is_mapping = isinstance(node, DictConfig)
    names = list(node.keys()) if is_mapping else list(range(len(node)))
    found: dict[Any, Any] = {}
    for name in names:
        below = f"{key}.{name}" if key else str(name)
        try:
            found[name] = to_plain(node[name], problems, below)
        except MissingMandatoryValue:
            found[name] = MISSING
        except OmegaConfBaseException as error:
            raw: Any = OmegaConf.to_container(node, resolve=False)
            rule = f"cannot be resolved: {str(error).splitlines()[0]}"
            problems.append(Problem(below, raw[name], rule))
    return {str(name): value for name, value in found.items()} if is_mapping else list(found.values())


def composer(node: HydraConf) -> Compose:
    """Make the function that composes the running command's configuration with other options of groups."""
    given = [*_lines(node.overrides.hydra), *_lines(node.overrides.task)]
    parsed = OverridesParser.create().parse_overrides(given)

    def compose(chosen: Mapping[str, Any]) -> Mapping[str, Any]:
        kept = [line for line, override in zip(given, parsed, strict=True) if override.key_or_group not in chosen]
        lines = [f"{group}={option}" for group, option in chosen.items()]
        try:
            config = hydra.compose(node.job.config_name, [*kept, *lines])
        except (HydraException, OmegaConfBaseException) as error:
            cause = f": {error.__cause__}" if error.__cause__ else ""
            rule = f"cannot be composed: {str(error).splitlines()[0]}{cause.splitlines()[0] if cause else ''}"
            raise ConfigError([Problem(group, option, rule) for group, option in chosen.items()]) from None
        problems: list[Problem] = []
        whole = to_plain(config, problems)
        if problems:
            raise ConfigError(problems)
        return {key: whole[key] for key in KEYS if key in whole}

    return compose


def group_options(group: str) -> Sequence[str]:
    """The options of a group, in our folder and in the user's."""
    loader = GlobalHydra.instance().config_loader()
    return loader.get_group_options(group, results_filter=ObjectType.CONFIG)


def check_runs(folder: Path) -> list[Problem]:
    """Whether run folders can be made in ``folder``: nothing is left behind by finding out."""
    problems = check_root(folder, "runs")
    standing = folder.absolute()
    while not standing.exists():
        standing = standing.parent
    if not problems:
        try:
            # permissions alone do not tell: root has them on a read-only disk as well
            with tempfile.TemporaryFile(dir=standing):
                pass
        except OSError as error:
            rule = f"the folder {str(standing)!r} cannot be written: {error.strerror}"
            problems.append(Problem("runs", str(folder), rule, "a folder that can be written or made"))
    return problems


def _runs(value: Any, plan_only: Any, problems: list[Problem]) -> Path:
    if not isinstance(value, str) or not value.strip():
        problems.append(Problem("runs", value, "must name a folder", "a path"))
        return Path("runs")
    folder = Path(value).expanduser()
    if plan_only is not True:
        problems += check_runs(folder)
    return folder


def _mapping(key: str, value: Any, problems: list[Problem]) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    problems.append(Problem(key, value, "must be a mapping"))
    return {}


def _sweep(value: Any, option: Any, problems: list[Problem]) -> dict[str, Any]:
    """The node ``sweep`` with its defaults, and whatever is wrong replaced by them."""
    given = _mapping("sweep", value, problems)
    for key in [key for key in given if key not in SWEEP]:
        rule = "unknown key"
        if key in (*KEYS, *OTHERS):
            rule += f" of sweep; for a file of the group sweep to set {key}, its first line must be {GLOBAL!r}"
        problems.append(Problem(f"sweep.{key}", given[key], rule, ", ".join(SWEEP), nearest(key, SWEEP)))
    sweep = {key: given.get(key, default) for key, default in SWEEP.items()}
    sweep["params"] = _mapping("sweep.params", sweep["params"], problems)
    sweep["zip"] = [] if sweep["zip"] is None else sweep["zip"]
    limit, found = coerce("sweep.limit", sweep["limit"], Kind("int"))
    if not found and limit < 1:
        found = [Problem("sweep.limit", limit, "must be at least 1", "an integer, at least 1")]
    problems += found
    sweep["limit"] = SWEEP["limit"] if found else limit
    # names are given by numbers and dates too (name: 2024); they are what they look like
    name = str(option or "sweep") if sweep["name"] is None else str(sweep["name"])
    if not name.strip():
        problems.append(Problem("sweep.name", name, "must not be empty", "text, or null: the name of the group option"))
    sweep["name"] = name
    return sweep


def _lines(overrides: Any) -> list[str]:
    """Hydra's list of overrides, interpolations left as they are: they are not the configuration yet."""
    # an iterator over a ListConfig would resolve them
    found: Any = OmegaConf.to_container(overrides, resolve=False)
    return [str(line) for line in found]


def _warn_without_effect(overrides: Sequence[str], keys: Collection[str]) -> None:
    """Warn of overrides of keys that are swept: the sweep's values are taken, and the override changes nothing."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    for line, override in zip(overrides, parsed, strict=True):
        key = override.key_or_group
        if key in keys:
            way = f"sweep.params.{key}=null takes it out of the sweep, sweep.params.{key}=[...] gives it other values"
            warnings.warn(f"{line} changes nothing, since {key} is swept; {way}", UserWarning, stacklevel=3)


def _given(overrides: Sequence[str]) -> set[tuple[str, ...]]:
    """The paths below ``sweep.params`` that the command line gives, as they are spelt there."""
    paths: set[tuple[str, ...]] = set()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        way = tuple(override.key_or_group.split("."))
        if way[:2] == ("sweep", "params"):
            paths |= set(_ends(override.value(), way[2:]))
    return paths


def _ends(value: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    if isinstance(value, dict):
        return [end for name, item in value.items() for end in _ends(item, (*path, str(name)))]
    return [path]
