"""What a run that goes on is to train: its own plan, and what overrides add to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from coalesce.configuration.command_line import NODES
from coalesce.configuration.hydra import Order, read
from coalesce.configuration.launching import check_launcher
from coalesce.configuration.options import Compose, rule_defaults
from coalesce.configuration.sources import File, Sources, files_of
from coalesce.configuration.union import FREE, OWN
from coalesce.errors import ConfigError, Problem, RunFolderError
from coalesce.experiment import KEYS
from coalesce.launch.settings import LauncherSettings
from coalesce.runner.plan import Plan, Trainer
from coalesce.store.resume import Reopened

#: A search's settings that end an experiment by its own curve. Were they to change, experiments of one run would have
#: ended by different rules.
STOPS = ("patience", "min_delta", "target")

#: Overrides that say what to do, and belong to no configuration that is kept.
_COMMANDS = ("resume", "retry", "plan")

#: The group whose options say where a run is trained, so that one that goes on may have another.
_WHERE = "launcher"


def overrides_of(node: HydraConf) -> list[str]:
    """What the command line gives beside ``resume``, ``retry`` and ``plan``."""
    given: Any = OmegaConf.to_container(node.overrides.task, resolve=False)
    parsed = OverridesParser.create().parse_overrides([str(line) for line in given])
    return [o.input_line or "" for o in parsed if o.key_or_group not in _COMMANDS]


def read_resumed(back: Reopened, overrides: Sequence[str]) -> Order:
    """The configuration of a run with overrides in it. To be called while Hydra runs.

    Args:
        back: the run.
        overrides: of the command line.

    Raises:
        ConfigError: with every problem found.
        RunFolderError: the run was not made by the command line, and has no configuration that could be overridden.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    problems = list(_groups(parsed))
    config = OmegaConf.create(back.configuration)
    if not isinstance(config, DictConfig) or "sweep" not in config:
        raise RunFolderError(f"{str(back.paths.configuration)!r} holds no configuration of `python -m coalesce`")
    problems += _placed(back, _given(overrides), config)
    if problems:
        raise ConfigError(problems)
    config[_WHERE] = _stored_launcher(back, config)
    files = [File(back.paths.configuration.absolute(), "")]
    for override in [override for override in parsed if _is_option(override)]:
        parsed.remove(override)
        config[_WHERE] = _option(str(override.value()), files)
    stops = {f"search.{name}": OmegaConf.select(config, f"search.{name}") for name in STOPS}
    try:
        ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
    except HydraException as error:
        raise ConfigError([Problem("resume", str(back.paths.folder), str(error).splitlines()[0])]) from None
    for key, before in stops.items():
        if (value := OmegaConf.select(config, key)) != before:
            rule = f"the run began with {before!r}, which decides when its experiments end, and goes on with it"
            problems.append(Problem(key, value, rule, OWN))
    if problems:
        raise ConfigError(problems)
    sources = Sources(overrides, (_WHERE,), files)
    base: Any = {key: config.get(key) for key in KEYS if key in config}
    compose = _composed(back.plan, base, overrides)
    order = read(config, overrides, sources, compose, back.plan.name, anew=False)
    if overrides:
        _check_search(order, overrides)
    return order


def settings(back: Reopened, order: Order | None, overrides: Sequence[str]) -> Trainer:
    """How the run goes on: as it did, but for what the command line may change.

    Raises:
        ConfigError: it changes what must stay.
    """
    stored = back.plan.trainer
    if order is None:
        return stored
    problems, changed = [], {}
    for key in _given(overrides):
        top, _, name = key.partition(".")
        if top != "trainer" or not hasattr(stored, name):
            continue
        value, before = getattr(order.trainer, name), getattr(stored, name)
        if name in FREE:
            changed[name] = value
        elif value != before:
            rule = f"the run began with {before!r}, which shows in its numbers, and goes on with it"
            problems.append(Problem(key, value, rule, OWN))
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(stored, **changed)


def launcher_of(back: Reopened) -> LauncherSettings:
    """Where a run was trained, for one that goes on without overrides.

    Raises:
        ConfigError: that cannot be done here.
    """
    config = OmegaConf.create(back.configuration)
    stored = _stored_launcher(back, config) if isinstance(config, DictConfig) else {}
    found: Any = OmegaConf.to_container(OmegaConf.create(stored), resolve=True)
    return check_launcher(found)


def _stored_launcher(back: Reopened, config: DictConfig) -> Any:
    stored = config.get(_WHERE)
    if stored is None or (dict(stored) == {"name": "local"} and not back.paths.jobs()):
        # what is called "process" was called so when there was nothing else, and had no other key
        return {"name": "process"}
    return stored


def _is_option(override: Override) -> bool:
    """Whether an override chooses where the run goes on."""
    return override.key_or_group == _WHERE and isinstance(override.value(), str) and not override.is_delete()


def _option(name: str, files: list[File]) -> Any:
    """An option of the group, ours or the user's; its interpolations are those of the run."""
    node = HydraConfig.get()
    try:
        composed = hydra.compose(node.job.config_name, [f"{_WHERE}={name}"])
    except HydraException as error:
        raise ConfigError([Problem(_WHERE, name, str(error).splitlines()[0], source="command line")]) from None
    files += [file for file in files_of(node) if file.package == _WHERE]
    return OmegaConf.to_container(composed[_WHERE], resolve=False)


def _groups(parsed: Sequence[Override]) -> Iterable[Problem]:
    for override in parsed:
        key, value = override.key_or_group, override.value()
        if key in NODES and not isinstance(value, dict) and not _is_option(override):
            rule = "a run that goes on keeps the options that it chose"
            valid = f"overrides of keys, such as {key}.<key>=...; or a run of its own"
            yield Problem(key, value, rule, valid, source="command line")


def _placed(back: Reopened, given: Mapping[str, Any], config: DictConfig) -> Iterable[Problem]:
    """What of the overrides would give the run another name or another place."""
    stays = {"sweep.name": ("name", back.plan.name), "runs": ("place", config.get("runs", "runs"))}
    for key, (what, before) in stays.items():
        if key in given and given[key] is not None and str(given[key]) != before:
            rule = f"a run that goes on keeps its {what}, {before!r}: its folder is {back.paths.folder}"
            yield Problem(key, given[key], rule, OWN, source="command line")


def _given(overrides: Sequence[str]) -> dict[str, Any]:
    """The dotted keys that overrides give, and their values."""
    found: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        value = override.value()
        key = override.key_or_group
        found |= {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
    return found


def _composed(plan: Plan, base: Mapping[str, Any], overrides: Sequence[str]) -> Compose:
    """Makes the base for an option of a swept group: what the run's own experiments of that option have. Everything in
    it that is swept is replaced by the sweep's values."""
    given = [(key, value) for key, value in _given(overrides).items() if key.split(".")[0] in KEYS]

    def compose(chosen: Mapping[str, Any]) -> Mapping[str, Any]:
        for experiment in plan.experiments:
            if all(experiment.values.get(group) == option for group, option in chosen.items()):
                if given:
                    rule = f"the run sweeps {', '.join(chosen)}, whose options have settings of their own"
                    raise ConfigError([Problem(*given[0], rule, "sweep.params; or a run of its own")])
                return experiment.config
        return rule_defaults(base)(chosen)

    return compose


def _check_search(order: Order, overrides: Sequence[str]) -> None:
    """Refuse more experiments where a search has decided about others by those that there were."""
    changed = [(key, value) for key, value in _given(overrides).items() if key.split(".")[0] not in ("trainer", _WHERE)]
    if changed and (order.search.replays or not order.search.lists):
        rule = "the run's search decides by what it has seen, so that its experiments cannot be changed afterwards"
        raise ConfigError([Problem(*changed[0], rule, OWN)])
