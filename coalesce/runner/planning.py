"""From experiments to a plan: cohorts, widths, and what they are thought to cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from coalesce import kernels
from coalesce.engine.lanes import Lanes
from coalesce.engine.measure import choose_lowerings
from coalesce.engine.pieces import choose, matching, recomputed
from coalesce.engine.shares import Shares
from coalesce.engine.template import Template
from coalesce.errors import ConfigError, Problem, TaskError, nearest
from coalesce.experiment import Cohort, Experiment, Rides, group, shape_of
from coalesce.runner import exactness
from coalesce.runner.plan import Plan, PlannedCohort, Trainer
from coalesce.runner.width import LEAST_WIDTH, Room, estimate, fitting, is_near, measure, widest
from coalesce.search.base import Search


@dataclass(frozen=True)
class Place:
    """What a job must know of a cohort of which it trains a part.

    Args:
        index: the cohort's number in the whole run.
        lanes: what its graph has at the most, in each of its jobs: one width, whatever a job's share is.
    """

    index: int
    lanes: int


def make_plan(
    name: str,
    keys: Sequence[str],
    experiments: Iterable[Experiment],
    rides: Rides,
    trainer: Trainer,
    probes: Iterable[Experiment] = (),
    count: int | None = None,
    decided: Iterable[PlannedCohort] = (),
    together: bool = False,
    *,
    places: Mapping[str, Place] | None = None,
    elsewhere: bool = False,
    beside: int = 1,
) -> Plan:
    """Group experiments into cohorts and rehearse each one: build its model, load its data, take one eager step, and
    trace the step once for every kind of cohort, so that what cannot be traced is known before anything is written.

    An experiment that raises at that is left out of it, and stands in the plan's ``failed``.

    Args:
        name: the sweep's name.
        keys: the swept keys, in the sweep's order.
        experiments: each once, in the sweep's order.
        rides: whether a leaf of the configuration may differ within a graph, see `group`.
        trainer: how to run them.
        probes, count: of a search that makes its experiments as it goes, see `Search`: experiments that show what may
            differ, and how many it will ask for.
        decided: cohorts of an earlier plan of this run. What was decided for them (width, pieces, lowerings) is obeyed.
        together: the lanes of all cohorts are there at once, and share the memory evenly.
        places: of a job, whose experiments are a part of a run's: `Cohort.shape` → the cohort's place in the whole.
        elsewhere: the plan is made to be shared out: nothing is measured on this machine, which is not the one that
            will train, and its devices are not asked for.
        beside: processes that share the device's memory, this one included.

    Raises:
        ConfigError: problems of all cohorts together; or there is not the memory for one lane.
        TaskError: the task's own code fails, in every experiment.
    """
    experiments = tuple(experiments)
    problems: dict[Problem, None] = {}
    asked = trainer
    trainer, found = (replace(trainer, device="cpu"), []) if elsewhere else _resolve(trainer)
    problems |= dict.fromkeys(found)
    if not elsewhere and not found:
        exactness.tell(trainer)
    templates: list[Template] = []
    failed: dict[str, str] = {}
    out: list[Cohort] = []
    for cohort in group(experiments, rides, probes):
        try:
            template, messages = _template(cohort, trainer)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        failed |= messages
        if template is None:
            out.append(cohort)
            continue
        found = _check_batch_size(template) + _check_metrics(template, trainer)
        found += _check_judged(template, trainer) + _check_pieces(template, trainer)
        problems |= dict.fromkeys(found)
        # cohorts that differ in their model alone have one data set: keep it once
        template.data = next((t.data for t in templates if t.data.equals(template.data)), template.data)
        templates.append(template)
    if problems:
        raise ConfigError(problems)
    if not templates and failed:
        raise TaskError(next(iter(failed.values())))
    if trainer.stack and not places:
        # of a job, whoever shared out has looked
        _check_traces(templates)
    before = {c.cohort.shape: c for c in decided}
    room = Room.of(trainer, beside * (len(templates) if together else 1))
    planned = []
    for template in templates:
        shape = template.cohort.shape
        if elsewhere:
            planned.append(_unmeasured(template, trainer, count))
            continue
        try:
            lanes = places[shape].lanes if places else count
            planned.append(plan_cohort(template, trainer, room, lanes, before.get(shape)))
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(problems)
    planned += [PlannedCohort(cohort, 0, 0, 0, 0, 0) for cohort in out]
    if places:
        planned = [replace(c, cohort=replace(c.cohort, index=places[c.cohort.shape].index)) for c in planned]
    planned.sort(key=lambda c: c.cohort.index)
    trainer = replace(trainer, device=asked.device) if elsewhere else trainer
    return Plan(name, tuple(keys), experiments, tuple(planned), trainer, failed, count or 0)


def _unmeasured(template: Template, trainer: Trainer, count: int | None) -> PlannedCohort:
    """A cohort as far as it can be planned on another machine than the one that will train it."""
    width = widest(count or len(template.cohort.experiments), trainer)
    parameters = sum(p.numel() for p in template.model.parameters())
    footprint = estimate(template, trainer)
    return PlannedCohort(template.cohort, width, parameters, footprint.per_lane, footprint.shared, template=template)


def plan_search(
    name: str,
    keys: Sequence[str],
    search: Search,
    rides: Rides,
    trainer: Trainer,
    decided: Iterable[PlannedCohort] = (),
    *,
    elsewhere: bool = False,
) -> Plan:
    """`make_plan` of what a search will ask for."""
    experiments, probes, count = (search.known(), (), None) if search.lists else ((), search.known(), search.count)
    some = probes, count, decided, search.asks_again
    return make_plan(name, keys, experiments, rides, trainer, *some, elsewhere=elsewhere)


#: Experiments of a cohort that are tried before the cohort is given up.
_TRIED = 3


def _template(cohort: Cohort, trainer: Trainer) -> tuple[Template | None, dict[str, str]]:
    """A cohort's template, of the first experiment that can stand for it; and id → what kept others from it.

    Without a template, all of the cohort's experiments have failed.
    """
    failed: dict[str, str] = {}
    members = cohort.members
    for place in range(min(_TRIED, len(members))):
        try:
            template = Template(replace(cohort, experiments=members[place:], probes=()), audit=trainer.stack)
        except TaskError as error:
            if not _fails_alone(members[place], cohort, trainer):
                # it is not the experiment, but what it shares with others
                raise
            failed[members[place].id] = str(error)
            continue
        template.cohort = cohort
        return template, failed
    last = list(failed.values())[-1]
    return None, {e.id: failed.get(e.id, last) for e in cohort.experiments}


def _fails_alone(experiment: Experiment, cohort: Cohort, trainer: Trainer) -> bool:
    try:
        Template(replace(cohort, experiments=(experiment,), probes=(), riding=()), audit=trainer.stack)
    except TaskError:
        return True
    return False


def grown(plan: Plan, experiments: Sequence[Experiment], rides: Rides) -> Plan:
    """A plan with more experiments, each in the cohort that it belongs to.

    Raises:
        LookupError: there is no cohort for one of them: no probe was like it.
    """
    more: dict[str, list[Experiment]] = {c.cohort.shape: [] for c in plan.cohorts}
    for experiment in experiments:
        shape = shape_of(experiment, rides)
        if shape not in more:
            raise LookupError(f"the plan has no graph for {experiment}: the search has no probe like it")
        more[shape].append(experiment)
    cohorts = [
        replace(c, cohort=replace(c.cohort, experiments=(*c.cohort.experiments, *more[c.cohort.shape])))
        for c in plan.cohorts
    ]
    return replace(plan, experiments=(*plan.experiments, *experiments), cohorts=tuple(cohorts))


def _check_traces(templates: Sequence[Template]) -> None:
    """Trace the graphs of one cohort for each task class, each set of riding attributes and each size of short
    batches, at the least width."""
    kinds = {(t.task_class, t.riding, t.batch_sizes[1:], t.folds is None): t for t in reversed(templates)}
    for template in kinds.values():
        lanes = Lanes(template, LEAST_WIDTH, compile=False)
        lanes.prepare_step()
        for split in template.evaluated:
            lanes.prepare_evaluation(split)


def plan_cohort(
    template: Template, trainer: Trainer, room: Room, count: int | None = None, decided: PlannedCohort | None = None
) -> PlannedCohort:
    """A cohort's width, and what its lanes take.

    Args:
        room: the device's memory.
        count: experiments that are to come, where they are not known yet.
        decided: the same cohort in an earlier plan.

    Raises:
        ConfigError: there is not the memory for one lane.
    """
    parameters = sum(p.numel() for p in template.model.parameters())
    footprint = estimate(template, trainer)
    # it has no lanes where none of its experiments could be planned
    if decided is not None and decided.width and trainer.stack:
        return replace(decided, cohort=template.cohort, parameters=parameters, template=template)
    free = room.bytes(trainer, footprint.shared)
    count = count or len(template.cohort.experiments)
    most = widest(count, trainer)
    again = recomputed(template.model, trainer.checkpoint) if trainer.stack else ()
    # chosen once: what is measured below is measured with it
    lowerings = _lowerings(template, trainer, most)
    if trainer.stack and trainer.width == "auto" and is_near(footprint, template, trainer, most, free):
        footprint = measure(footprint, template, trainer, _pieces(template, trainer, most), lowerings, again)
    width = fitting(footprint, template, count, trainer, free)
    pieces = _pieces(template, trainer, width)
    sizes = parameters, footprint.per_lane, footprint.shared, free
    return PlannedCohort(template.cohort, width, *sizes, pieces, again, lowerings, template)


def _lowerings(template: Template, trainer: Trainer, width: int) -> dict[str, str]:
    """How convolutions of so many lanes are lowered, timed as a share of them runs."""
    if not trainer.stack:
        return {}
    with kernels.arithmetic(trainer.threads, trainer.matmul_precision):
        convolutions, how = template.rehearsal.convolutions, (trainer.device, trainer.convolution, trainer.compile)
        shares = Shares.of(template, width, trainer.device, trainer.compile)
        with shares.prepare():
            return choose_lowerings(convolutions, width, *how, shares.lanes)


def _pieces(template: Template, trainer: Trainer, width: int) -> tuple[str, ...]:
    if not trainer.stack:
        return ()
    if isinstance(trainer.pieces, str):
        return choose(template.model, width)
    return matching(template.model, trainer.pieces)


def metric_names(template: Template) -> list[str]:
    """The metrics that exist while a cohort trains."""
    names = [f"train/{n}" for n in ("loss", *template.rehearsal.extras)]
    measured = (*template.rehearsal.metrics, *template.rehearsal.summaries)
    return names + [f"val/{n}" for n in measured if "val" in template.evaluated]


def _resolve(trainer: Trainer) -> tuple[Trainer, list[Problem]]:
    device, problems = trainer.device, []
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        problems.append(Problem("trainer.device", device, "this torch sees no CUDA device", "auto or cpu"))
    return replace(trainer, device=device, threads=trainer.threads or torch.get_num_threads()), problems


def _check_batch_size(template: Template) -> list[Problem]:
    size = template.experiment.batch_size
    count = min(template.count(experiment, "train") for experiment in template.cohort.members)
    if size <= count:
        return []
    valid = f"at most {count}, its number of samples"
    return [Problem("batch_size", size, "larger than the training data", valid)]


def _check_pieces(template: Template, trainer: Trainer) -> list[Problem]:
    names = [name for name, _ in template.model.named_modules() if name]
    rule = f"matches no module of {template.task_class.__name__}'s model"
    given = {"trainer.pieces": trainer.pieces, "trainer.checkpoint": trainer.checkpoint}
    return [
        Problem(key, pattern, rule, ", ".join(names), nearest(pattern, names))
        for key, patterns in given.items()
        if isinstance(patterns, tuple)
        for pattern in patterns
        if not matching(template.model, [pattern])
    ]


def _check_metrics(template: Template, trainer: Trainer) -> list[Problem]:
    names = metric_names(template)
    ended = names + [f"test/{n}" for n in template.rehearsal.metrics if "test" in template.data.sizes]
    given = [("trainer.monitor", trainer.monitor, names), *(("trainer.show", name, ended) for name in trainer.show)]
    if template.schedule.judges:
        given.append(("schedule.monitor", template.experiment.config["schedule"]["monitor"], names))
    rule = "no such metric"
    return [
        Problem(key, name, rule, ", ".join(known), nearest(name, known))
        for key, name, known in given
        if name not in known
    ]


def _check_judged(template: Template, trainer: Trainer) -> list[Problem]:
    """Whether a schedule that looks at a metric can have it when it wants it."""
    if not template.schedule.judges:
        return []
    problems = []
    for every in dict.fromkeys(e.config["schedule"]["every"] for e in template.cohort.members):
        if every % trainer.every:
            # lanes stop together, so a stop of one's own would shift its neighbours'
            rule = f"must be a multiple of trainer.every, which is {trainer.every}"
            valid = f"{trainer.every}, {2 * trainer.every}, {3 * trainer.every}, …; or a smaller trainer.every"
            problems.append(Problem("schedule.every", every, rule, valid))
    return problems
