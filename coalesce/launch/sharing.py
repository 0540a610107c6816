"""Which job trains which experiments."""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from coalesce.experiment import Cohort
from coalesce.runner.plan import Plan
from coalesce.search.base import Search

#: As many parameters a lane is taken to have at the least: a step of a smaller model costs what its operations cost
#: to be called, whatever they compute.
LEAST_PARAMETERS = 10_000
#: What sums of costs may differ by through rounding, relatively.
ROUNDING = 1e-9
#: By what part of its cost an exchange must make the costliest job cheaper.
WORTH = 1e-3


@dataclass(frozen=True)
class Shares:
    """Which job trains what.

    Args:
        jobs: for each job the ids of its experiments, in the order of the cohorts' experiments.
        lanes: for each cohort, by its index, how many experiments of it the job has that has the most of them. No job
            needs more lanes; and as many in each of them make one width, at which the numbers do not depend on the job.
    """

    jobs: tuple[tuple[str, ...], ...]
    lanes: Mapping[int, int]


@dataclass(frozen=True, order=True)
class _Item:
    """An experiment to place. They sort by falling cost; equal ones by their ids, which are hashes: so the shares of
    a job are no slice of the grid, and a search that compares experiments within a job compares unlike ones."""

    negative: float
    id: str
    cost: float = field(compare=False)
    cohort: int = field(compare=False)


@dataclass
class _Job:
    """A job on the way."""

    items: list[_Item] = field(default_factory=list)
    load: float = 0.0

    def add(self, item: _Item) -> None:
        self.items.append(item)
        self.load += item.cost

    @property
    def cohorts(self) -> set[int]:
        return {item.cohort for item in self.items}

    def of(self, cohort: int) -> list[_Item]:
        return [item for item in self.items if item.cohort == cohort]


_Jobs = list[_Job]


def estimated_costs(plan: Plan) -> dict[str, float]:
    """What each experiment of a plan's cohorts is thought to cost, in units of its own: its steps, times its
    batch size, times the parameters of a lane, or `LEAST_PARAMETERS` if there are fewer.

    It is no time. It tells a long experiment from a short one of the same cohort exactly, and a large model from a
    small one roughly: a convolution uses a parameter more often than a linear layer does. What a job needs to compile
    its graphs is not in it.

    Returns:
        id → cost.
    """
    return {
        experiment.id: float(experiment.steps * experiment.batch_size * max(planned.parameters, LEAST_PARAMETERS))
        for planned in plan.cohorts
        for experiment in planned.cohort.experiments
    }


def share_search(search: Search, plan: Plan, jobs: int, most: int | None = None) -> Shares:
    """Share out what a search asks for: by `share` at the `estimated_costs`.

    A search that makes its experiments as it goes shares out how many there will be. What belongs together
    (`Search.together`) stays together, so that a job may have more than ``most`` where that is less.

    Args:
        search: of the whole, for `Search.part`.
        plan: of the whole. What failed while it was made is in no job's share.
        jobs, most: see `share`.

    Returns:
        The shares; of a search that does not list its experiments, an empty one for each job.

    Raises:
        ValueError: ``jobs`` or ``most`` is below 1.
    """
    cohorts = [planned.cohort for planned in plan.cohorts]
    if search.lists:
        return share(cohorts, estimated_costs(plan), jobs, most)
    _check(jobs, most)
    trials = search.count // search.together
    cap = trials if most is None else max(1, most // search.together)
    count = min(max(jobs, math.ceil(trials / cap)), trials)
    lanes = math.ceil(trials / count) * search.together
    return Shares(((),) * count, {cohort.index: lanes for cohort in cohorts})


def share(cohorts: Sequence[Cohort], cost: Mapping[str, float], jobs: int, most: int | None = None) -> Shares:
    """Share out experiments over jobs: the longest job as short as possible, then each cohort in few jobs, since every
    job compiles its own graphs.

    Both problems are NP-hard, so what is promised is this:

    - Every experiment is in one job; no job is empty, or has more than ``most``.
    - There are ``jobs`` jobs at the most, or as many as ``most`` makes necessary. There are fewer where fewer do:
      4 equal experiments take 2 jobs of 2 rather than 3, as the longest has 2 anyway.
    - The costliest job costs no more than a bound, which is found without looking at cohorts: by Graham's rule (largest
      first, each to the job that has least; SIAM J. Appl. Math. 17, 1969), and by exchanges after it, until none makes
      the costliest job cheaper. Graham's rule alone is within 4/3 of the best possible. Where jobs are full by ``most``
      his proof does not hold: there it is within 4/3 in every case that was tried, and nothing is proved.
    - There are no more pairs of a cohort and a job that has experiments of it than there. And no job's share of a
      cohort could move as a whole to another job that has experiments of this cohort, which would cost more than the
      bound or have more than ``most``.
    - The same arguments give the same shares.

    Args:
        cohorts: what to share out; those without experiments are passed over.
        cost: id → what the experiment costs, in any unit. See `estimated_costs`.
        jobs: how many there may be.
        most: experiments of a job at the most; None: no matter how many.

    Returns:
        The costliest job first.

    Raises:
        ValueError: ``jobs`` or ``most`` is below 1, a cost is negative or not finite, or an experiment is named twice.
        KeyError: an experiment has no cost.

    >>> from coalesce.experiment import Experiment
    >>> cohort = Cohort(0, tuple(Experiment({"seed": seed}) for seed in range(53)), ())
    >>> shares = share([cohort], {experiment.id: 1.0 for experiment in cohort.experiments}, jobs=8)
    >>> [len(job) for job in shares.jobs], shares.lanes
    ([7, 7, 7, 7, 7, 6, 6, 6], {0: 7})
    """
    items = sorted(_items(cohorts, cost))
    _check(jobs, most)
    if not items:
        return Shares((), {})
    cap = len(items) if most is None else most
    count = min(max(jobs, math.ceil(len(items) / cap)), len(items))
    graham = _graham(items, count, cap)
    _exchange(graham, cap)
    bound = _longest(graham) * (1 + ROUNDING)
    found = [graham]
    for order in _ORDERS:
        filled = _by_cohort(items, count, cap, bound, order)
        found += [] if filled is None else [filled]
    best = min(found, key=lambda jobs: (_pairs(jobs), _longest(jobs)))
    best = _balanced(best, cap, bound)
    while _join(best, cap, bound):
        best = _balanced(best, cap, bound)
    place = {e.id: place for place, e in enumerate(e for cohort in cohorts for e in cohort.experiments)}
    shares = [sorted((item.id for item in job.items), key=place.__getitem__) for job in best if job.items]
    # sums without rounding, so that equal jobs are equal
    shares.sort(key=lambda ids: (-math.fsum(cost[name] for name in ids), place[ids[0]]))
    lanes: Counter[int] = Counter()
    for job in best:
        for cohort, number in Counter(item.cohort for item in job.items).items():
            lanes[cohort] = max(lanes[cohort], number)
    return Shares(tuple(map(tuple, shares)), {c.index: lanes[c.index] for c in cohorts if c.experiments})


def _check(jobs: int, most: int | None) -> None:
    for name, value in (("jobs", jobs), ("most", most)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def _items(cohorts: Sequence[Cohort], cost: Mapping[str, float]) -> list[_Item]:
    items: dict[str, _Item] = {}
    for cohort in cohorts:
        for experiment in cohort.experiments:
            value = float(cost[experiment.id])
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"the cost of {experiment} is {value}; it must be finite and not below 0")
            if experiment.id in items:
                raise ValueError(f"{experiment} is named twice")
            items[experiment.id] = _Item(-value, experiment.id, value, cohort.index)
    return list(items.values())


def _graham(items: Sequence[_Item], count: int, cap: int) -> _Jobs:
    jobs = [_Job() for _ in range(count)]
    free = [(0.0, number) for number in range(count)]
    for item in items:
        _, number = heapq.heappop(free)
        jobs[number].add(item)
        if len(jobs[number].items) < cap:
            heapq.heappush(free, (jobs[number].load, number))
    return jobs


def _exchange(jobs: _Jobs, cap: int) -> None:
    """Move an experiment of the costliest job to another job, or exchange it for a cheaper one there, as long as this
    makes the costlier one of the two cheaper."""
    while True:
        longest = max(jobs, key=lambda job: job.load)
        best, chosen = longest.load * (1 - WORTH), None
        given = {item.cost: item for item in longest.items}
        for other in (job for job in jobs if job.load < best):
            taken: dict[float, _Item | None] = {item.cost: item for item in other.items}
            if len(other.items) < cap:
                taken.setdefault(0.0, None)
            costs = sorted(taken)
            for mine in given.values():
                # the nearest to what would make the two alike, from both sides
                place = bisect.bisect(costs, mine.cost - (longest.load - other.load) / 2)
                for cost in costs[max(place - 1, 0) : place + 1]:
                    costlier = max(longest.load - mine.cost + cost, other.load + mine.cost - cost)
                    if costlier < best:
                        best, chosen = costlier, (other, mine, taken[cost])
        if chosen is None:
            return
        other, mine, its = chosen
        _move(longest, other, [mine])
        _move(other, longest, [] if its is None else [its])


def _move(job: _Job, other: _Job, items: Sequence[_Item]) -> None:
    ids = {item.id for item in items}
    job.items = [item for item in job.items if item.id not in ids]
    other.items += items
    for each in (job, other):
        # not by differences, which would add up what rounding does
        each.load = math.fsum(item.cost for item in each.items)


#: In which order cohorts are filled in: by the cost of their largest experiment, as what is small fits in anywhere; or
#: by what they cost in all.
_Order = Callable[[Sequence[_Item]], tuple[float, ...]]
_ORDERS: Sequence[_Order] = (
    lambda items: (-items[0].cost, -math.fsum(item.cost for item in items)),
    lambda items: (-math.fsum(item.cost for item in items),),
)


def _by_cohort(items: Sequence[_Item], count: int, cap: int, bound: float, order: _Order) -> _Jobs | None:
    """Fill jobs up to the bound, cohort by cohort: what is left of one goes where all of it fits and the least room is
    left, or else to the job that takes the most of it. None: something fits nowhere."""
    cohorts: dict[int, list[_Item]] = {}
    for item in items:
        cohorts.setdefault(item.cohort, []).append(item)
    jobs = [_Job() for _ in range(count)]
    for left in sorted(cohorts.values(), key=order):
        while left:
            # many jobs are alike: empty
            alike: dict[tuple[float, int], list[_Item]] = {}
            best, target, taken = (-1, -1.0), jobs[0], list[_Item]()
            for job in jobs:
                state = (job.load, len(job.items))
                if state not in alike:
                    alike[state] = _fitting(left, job, cap, bound)
                fits = alike[state]
                whole = len(fits) == len(left)
                rank = (whole, job.load if whole else math.fsum(item.cost for item in fits))
                if fits and rank > best:
                    best, target, taken = rank, job, fits
            if not taken:
                return None
            for item in taken:
                target.add(item)
            ids = {item.id for item in taken}
            left = [item for item in left if item.id not in ids]
    return jobs


def _fitting(items: Sequence[_Item], job: _Job, cap: int, bound: float) -> list[_Item]:
    load, slots = job.load, cap - len(job.items)
    fits: list[_Item] = []
    for item in items:
        if len(fits) == slots:
            break
        if load + item.cost <= bound:
            load += item.cost
            fits.append(item)
    return fits


def _balanced(jobs: _Jobs, cap: int, bound: float) -> _Jobs:
    """The same cohorts in the same jobs, by Graham's rule among these; or what was given, if that is better."""
    allowed: dict[int, list[int]] = {}
    for number, job in enumerate(jobs):
        for cohort in job.cohorts:
            allowed.setdefault(cohort, []).append(number)
    items = sorted(item for job in jobs for item in job.items)
    # what can only go to one place goes there first
    items.sort(key=lambda item: len(allowed[item.cohort]) > 1)
    balanced = [_Job() for _ in jobs]
    for item in items:
        free = [number for number in allowed[item.cohort] if len(balanced[number].items) < cap]
        if not free:
            return jobs
        balanced[min(free, key=lambda number: (balanced[number].load, number))].add(item)
    if _longest(balanced) > bound or _pairs(balanced) > _pairs(jobs):
        return jobs
    return balanced


def _join(jobs: _Jobs, cap: int, bound: float) -> bool:
    """Move one share of a cohort to another job that has experiments of it, if one fits."""
    for cohort in sorted({cohort for job in jobs for cohort in job.cohorts}):
        those = [(job, mine) for job in jobs if (mine := job.of(cohort))]
        for job, mine in sorted(those, key=lambda pair: math.fsum(item.cost for item in pair[1])):
            more = math.fsum(item.cost for item in mine)
            for other, _ in those:
                if other is not job and len(other.items) + len(mine) <= cap and other.load + more <= bound:
                    _move(job, other, mine)
                    return True
    return False


def _longest(jobs: _Jobs) -> float:
    return max(math.fsum(item.cost for item in job.items) for job in jobs)


def _pairs(jobs: _Jobs) -> int:
    return sum(len(job.cohorts) for job in jobs)
