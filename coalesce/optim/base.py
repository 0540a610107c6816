"""What a rule of `optim/` is: hyperparameters that declare themselves, and a pure function of one lane."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor

from coalesce.errors import Problem, nearest

State = dict[str, Tensor]


@dataclass(frozen=True)
class Hyper:
    """One hyperparameter: what it may be.

    Args:
        default: its default; its type is the hyperparameter's. A tuple is a list of that length.
        low, high: the bounds; ``open_low`` and ``open_high`` exclude the bound itself.
        optional: whether None (switched off) is a value.
        length: how long something lasts, in steps or evaluations. It is an integer, and rides although integers do
            not (law 3).
        text: what it does, one phrase, for messages.
        follows: the trainer's setting that None stands for. Configuration puts that setting's value in its place, so
            that the experiment's id shows what determines its result.
    """

    default: Any
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    optional: bool = False
    length: bool = False
    text: str = ""
    follows: str = ""

    def valid(self) -> str:
        """The valid values, in words."""
        if isinstance(self.default, bool):
            return "true or false"
        kind = "an integer" if self.length else "a finite number"
        if isinstance(self.default, tuple):
            kind = f"{len(self.default)} finite numbers"
        bounds = []
        if self.low > -math.inf:
            bounds.append(f"{'above' if self.open_low else 'at least'} {self.low:g}")
        if self.high < math.inf:
            bounds.append(f"{'below' if self.open_high else 'at most'} {self.high:g}")
        return " ".join([kind, " and ".join(bounds)]).strip() + (", or null" if self.optional else "")

    def check(self, key: str, value: Any) -> tuple[Any, list[Problem]]:
        """Return the value in its right type, and what is wrong with it."""
        if value is None and self.optional:
            return None, []
        if isinstance(self.default, bool):
            if isinstance(value, bool):
                return value, []
            return value, [Problem(key, value, "must be a boolean", self.valid())]
        if isinstance(self.default, tuple):
            if not isinstance(value, list | tuple) or len(value) != len(self.default):
                return value, [Problem(key, value, f"must be a list of {len(self.default)} numbers", self.valid())]
            checked = [self._number(f"{key}.{i}", v) for i, v in enumerate(value)]
            return [v for v, _ in checked], [p for _, found in checked for p in found]
        return self._number(key, value)

    def _number(self, key: str, given: Any) -> tuple[Any, list[Problem]]:
        def wrong(rule: str) -> tuple[Any, list[Problem]]:
            return given, [Problem(key, given, rule, self.valid())]

        if isinstance(given, bool) or not isinstance(given, int | float):
            return wrong("must be a number")
        value: int | float
        try:
            value = float(given)
        except OverflowError:  # an integer that no float can hold
            value = math.inf
        if not math.isfinite(value):
            return wrong("must be finite")
        if self.length:
            value = int(given)
            if value != given:
                return wrong("must be a whole number")
            if not -(2**63) <= value < 2**63:
                return wrong("must fit into 64 bits")
        below = value <= self.low if self.open_low else value < self.low
        above = value >= self.high if self.open_high else value > self.high
        return wrong("out of range") if below or above else (value, [])


@dataclass(frozen=True)
class Count(Hyper):
    """A hyperparameter that counts something in the graph: another value is another graph."""

    def valid(self) -> str:
        return f"an integer, at least {self.low:g}"

    def check(self, key: str, value: Any) -> tuple[Any, list[Problem]]:
        if isinstance(value, bool) or not isinstance(value, int):
            return value, [Problem(key, value, "must be an integer", self.valid())]
        return value, [Problem(key, value, "out of range", self.valid())] if not self.low <= value <= self.high else []


@dataclass(frozen=True)
class Lengths(Hyper):
    """A list of lengths, at least one; ``default`` is a tuple. They ride; another number of them is another graph."""

    length: bool = True

    def valid(self) -> str:
        return f"a list of integers, each at least {self.low:g}"

    def check(self, key: str, value: Any) -> tuple[Any, list[Problem]]:
        if not isinstance(value, list | tuple) or not value:
            return value, [Problem(key, value, "must be a list of at least 1 number", self.valid())]
        checked = [self._number(f"{key}.{i}", v) for i, v in enumerate(value)]
        return [v for v, _ in checked], [p for _, found in checked for p in found]


@dataclass(frozen=True)
class Word(Hyper):
    """One of the words of ``choices``, or any text where there are none. Another one is another graph."""

    choices: tuple[str, ...] = ()

    def valid(self) -> str:
        return (", ".join(self.choices) or "text") + (", or null" if self.optional else "")

    def check(self, key: str, value: Any) -> tuple[Any, list[Problem]]:
        if (value is None and self.optional) or value in self.choices:
            return value, []
        if self.choices:
            return value, [Problem(key, value, "not a valid choice", self.valid(), nearest(str(value), self.choices))]
        right = isinstance(value, str) and value.strip()
        return value, [] if right else [Problem(key, value, "must be text, not empty", self.valid())]


@dataclass(frozen=True)
class Patterns(Hyper):
    """A list of name patterns, by default empty. A rule's `update` sees whether its parameter's name matches one of
    them (see `coalesce.optim.groups`); another list is another graph."""

    def valid(self) -> str:
        return "a list of parameters' names, in which * stands for any text"

    def check(self, key: str, value: Any) -> tuple[Any, list[Problem]]:
        if not isinstance(value, list | tuple):
            return value, [Problem(key, value, "must be a list of text", self.valid())]
        wrong = [(i, v) for i, v in enumerate(value) if not isinstance(v, str) or not v]
        if wrong:
            return value, [Problem(f"{key}.{i}", v, "must be a name, or a pattern", self.valid()) for i, v in wrong]
        # the order says nothing, so that it makes no other experiment
        return sorted(set(value)), []


@dataclass(frozen=True)
class Factors(Hyper):
    """A mapping of name pattern → float, by default empty. The floats ride; other patterns are another graph."""

    def valid(self) -> str:
        return f"a mapping of a name pattern to a finite number, at least {self.low:g}"

    def check(self, key: str, value: Any) -> tuple[Any, list[Problem]]:
        if not isinstance(value, Mapping):
            return value, [Problem(key, value, "must be a mapping", self.valid())]
        checked = {str(name): self._number(f"{key}.{name}", item) for name, item in value.items()}
        return {n: checked[n][0] for n in sorted(checked)}, [p for _, found in checked.values() for p in found]


class Rule:
    """A named rule with hyperparameters. Subclasses are never instantiated: they hold pure functions.

    `hyper` maps each hyperparameter's name to its `Hyper`. `introduced` lists hyperparameters younger than the
    rule and the default they came with, so that the ids of older experiments survive (see `experiment_id`).
    """

    name: ClassVar[str]
    hyper: ClassVar[dict[str, Hyper]]
    introduced: ClassVar[dict[str, Any]] = {}

    @classmethod
    def check(cls, config: Mapping[str, Any], key: str) -> tuple[dict[str, Any], list[Problem]]:
        """Fill in defaults and check a configuration of this rule.

        Args:
            config: ``name`` and any of the hyperparameters.
            key: where it stands: ``"optimizer"``.

        Returns:
            ``name`` and every hyperparameter in its right type, in the rule's order; and the problems.
        """
        resolved: dict[str, Any] = {"name": cls.name}
        problems = []
        for name, spec in cls.hyper.items():
            default: Any = list(spec.default) if isinstance(spec.default, tuple) else spec.default
            resolved[name], found = spec.check(f"{key}.{name}", config.get(name, default))
            problems += found
        for name in config:
            if name not in cls.hyper and name != "name":
                rule = f"unknown key for {key} {cls.name!r}"
                problems.append(
                    Problem(f"{key}.{name}", config[name], rule, ", ".join(cls.hyper), nearest(name, cls.hyper))
                )
        if not problems:
            problems += cls.check_together(resolved, key)
        return resolved, problems

    @classmethod
    def check_together(cls, config: Mapping[str, Any], key: str) -> list[Problem]:
        """What is wrong between hyperparameters that are right one by one."""
        return []


class Optimizer(Rule):
    """An update rule: a pure function of one parameter of one lane. The engine maps it over the lanes.

    Attributes:
        rates: names of the hyperparameters that the schedule and the factors of `lr_factors` multiply.
        decays: names of those that are 0 for a parameter of `no_decay`.
        entrywise: whether each entry of a parameter is updated from its own gradient and state alone, whatever the
            parameter's shape is. Then small parameters may be updated as one.
    """

    #: The options that came after the first version (see `common.OPTIONS`).
    introduced: ClassVar[dict[str, Any]] = {
        "clip_value": None,
        "no_decay": [],
        "lr_factors": {},
        "ema": None,
        "accumulate": 1,
    }
    rates: ClassVar[tuple[str, ...]] = ("lr",)
    decays: ClassVar[tuple[str, ...]] = ("weight_decay",)
    entrywise: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # another update is not entry by entry because the one was that it replaces
        if "update" in vars(cls) and "entrywise" not in vars(cls):
            cls.entrywise = False

    @classmethod
    def init(cls, param: Tensor, hyper: Mapping[str, Any]) -> State:
        """The named state of a parameter before the first step. Its names, shapes and dtypes are those of every lane.

        Args:
            param: (...) one lane's parameter.
            hyper: the lane's own hyperparameters, `Patterns` as in `update`; only values may follow from what rides.
        """
        raise NotImplementedError

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        """One step.

        Args:
            param, grad: (...) one lane's parameter and its gradient, of one dtype.
            state: as `init` made it.
            hyper: every hyperparameter: floats as 0-d float64 tensors (they ride), pairs as tuples of such,
                `Patterns` as whether this parameter matches one, the rest as Python values. ``lr`` is the scheduled
                one. Scalars are combined in float64, as Python does in `torch.optim`, and cast to the parameter's
                dtype last.
            step: 0-d int64, 1 at the first update.

        Returns:
            The new parameter and state, of unchanged shapes and dtypes.
        """
        raise NotImplementedError

    @classmethod
    def momentum_keys(cls) -> tuple[str, ...]:
        """The hyperparameters that a schedule moves where it moves the momentum, as torch's `OneCycleLR` picks them:
        ``momentum``, and the first of the ``betas``."""
        return tuple(key for key in ("momentum", "betas.0") if key.partition(".")[0] in cls.hyper)


class Schedule(Rule):
    """A factor on the learning rate: a pure function of the step, of constants that ride, and of what the schedule
    made of the lane's evaluations.

    Attributes:
        judges: whether it looks at a metric. Then its hyperparameters have ``monitor``, the metric's name, and
            ``every``, and the runner evaluates a lane and calls `observe` after each ``every`` of its steps.
    """

    judges: ClassVar[bool] = False

    @classmethod
    def check_beside(cls, config: Mapping[str, Any], optimizer: type[Optimizer], key: str) -> list[Problem]:
        """What is wrong between a configuration that is right by itself and the optimiser that it stands beside."""
        return []

    @classmethod
    def init(cls, hyper: Mapping[str, Any]) -> State:
        """What a lane's schedule keeps between evaluations, as it stands before the first one.

        Args:
            hyper: the configuration's hyperparameters; only those that do not ride may be looked at.

        Returns:
            0-d tensors by name.
        """
        return {}

    @classmethod
    def factor(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace, state: State) -> Tensor:
        """The factor at one step.

        Args:
            step: 0-d int64, 0 at the first update.
            steps: 0-d int64, the experiment's number of steps.
            hyper: floats as 0-d float64 tensors, lengths as 0-d int64 tensors, lists as tuples of such, the rest as
                Python values.
            state: as `init` and `observe` made it.

        Returns:
            0-d float64.
        """
        raise NotImplementedError

    @classmethod
    def momentum(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace) -> Tensor | None:
        """What stands in place of the optimiser's momentum, see `Optimizer.momentum_keys`: 0-d float64, or None: its
        own. Arguments as `factor`'s."""
        return None

    @classmethod
    def observe(cls, state: State, value: Tensor, step: Tensor, lr: Tensor, hyper: SimpleNamespace) -> State:
        """The state after an evaluation.

        Args:
            state: before it.
            value: 0-d float64, the monitored metric; it may be NaN.
            step: 0-d int64, updates done.
            lr: 0-d float64, the optimiser's learning rate before any factor.
            hyper: as `factor`'s.

        Returns:
            Of unchanged names and dtypes.
        """
        return state
