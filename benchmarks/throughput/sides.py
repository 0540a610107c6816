"""Each side brought up: what its first steps lose, what it compiles and takes, and its processes, ready to work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.throughput.processes import Caches, Contestant, Process
from benchmarks.throughput.workloads import STEPS, Workload, hyperparameters, write_given
from coalesce import kernels
from coalesce.memory.measure import READABLE

#: Steps whose losses all sides must agree on.
CHECKED = 4

#: Steps in one call of JAX's scan. Of the cnn one, which takes XLA about a second of a CPU for each experiment.
SCANNED = {"mlp": 40, "digits": 20, "cnn": 1, "gpt": 5}


@dataclass
class Setup:
    """What all sides need.

    Args:
        folder: for files.
        caches: of the compilers.
        cores: which all sides share.
        counts: numbers of plain processes.
        python: the interpreter that has the peers.
        compile: whether plain PyTorch and coalesce compile.
        thorough: also compile a second time from a warm cache, and measure memory.
        passive: threads wait for each other asleep on all sides, not only where that is best.
    """

    folder: Path
    caches: Caches
    cores: int
    counts: Sequence[int] = (1, 2, 4, 6)
    python: str = sys.executable
    compile: bool = True
    thorough: bool = True
    passive: bool = False

    @property
    def policies(self) -> Sequence[str]:
        """How threads wait for each other: awake, asleep. A thread alone waits for nobody."""
        return ("ACTIVE", kernels.PASSIVE) if self.cores > 1 and not self.passive else (kernels.PASSIVE,)


@dataclass
class Side:
    """A side that is ready.

    Args:
        name: "plain", "jax", ...
        contestants: the ways in which it works.
        losses: of the first steps, (steps, K), for each way that has losses of its own; None: not known.
        figures: seconds and bytes: "compile" and "compile, cache warm", "memory", and others of its own.
    """

    name: str
    contestants: list[Contestant]
    losses: Mapping[str, Sequence[Sequence[float | None]]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def close(self) -> None:
        """End its processes."""
        for process in {id(p): p for c in self.contestants for p in c.processes}.values():
            process.close()


def plain(workload: Workload, setup: Setup) -> Side:
    """As many processes as are ever asked for, each with the experiment of its number."""
    environment = setup.caches.environment(f"{workload.name}-plain")
    environment |= {kernels.WAIT: kernels.PASSIVE} if setup.passive else {}
    given = asdict(workload)
    pool = [Process("plain", {"workload": given, "number": n}, environment) for n in range(max(setup.counts))]
    kinds = ["eager", "compiled"] if setup.compile else ["eager"]
    optimizer = pool[0].call("choose")
    figures: dict[str, Any] = {"optimizer": optimizer or "as torch takes it by itself"}
    # in turns: the first one compiles, the next one finds it in the cache
    seconds = []
    for number, process in enumerate(pool):
        threads = {max(1, setup.cores // c) for c in setup.counts if number < c}
        seconds.append(process.call("prepare", kinds=kinds, threads=sorted(threads), optimizer=optimizer))
    if setup.compile:
        figures["compile"] = seconds[0]["compiled"]
        figures["compile, cache warm"] = seconds[-1]["compiled"] if len(pool) > 1 else None
    losses = {kind: pool[0].call("losses", steps=CHECKED, kind=kind) for kind in kinds}
    if setup.thorough:
        alone = Process("plain", {"workload": given}, environment | READABLE)
        alone.call("prepare", kinds=["eager"], threads=[1], optimizer=optimizer)
        figures["memory"] = alone.call("memory")
        alone.close()
    contestants = [
        Contestant(
            f"plain {kind}, {count} process{'es' * (count > 1)}",
            pool[:count],
            {"kind": kind, "threads": max(1, setup.cores // count)},
        )
        for kind in kinds
        for count in setup.counts
    ]
    return Side("plain", contestants, losses, figures)


def coalesced(workload: Workload, setup: Setup) -> Side:
    """The product's own path."""
    environment = setup.caches.environment(f"{workload.name}-{workload.lanes}-coalesced")
    arguments = {"workload": asdict(workload), "threads": setup.cores, "compile": setup.compile}
    process = Process("coalesced", arguments, environment)
    told = process.call("losses", steps=CHECKED)
    losses = {"coalesced": told.pop("losses")}
    figures = {"compile": told["compile_s"], "to the first step": told["first_s"]}
    if setup.thorough:
        process.close()
        alone = Process("coalesced", arguments, environment | READABLE)
        figures["memory"] = alone.call("memory")
        alone.close()
        process = Process("coalesced", arguments, environment)
    told = process.call("prepare")
    if setup.thorough:
        figures |= {"compile, cache warm": told["compile_s"], "to the first step, cache warm": told["first_s"]}
    return Side("coalesced", [Contestant("coalesced", [process])], losses, figures)


def floor(workload: Workload, setup: Setup) -> Side:
    """The products alone; threads that wait asleep and threads that wait awake, whichever do better."""
    contestants = []
    figures: dict[str, Any] = {}
    for policy in setup.policies:
        arguments = {"workload": asdict(workload), "threads": setup.cores}
        process = Process("floor", arguments, {kernels.WAIT: policy})
        figures[policy] = process.call("prepare")
        contestants.append(Contestant(f"floor, threads wait {policy.lower()}", [process]))
    return Side("floor", contestants, {}, figures)


def jax(workload: Workload, setup: Setup) -> Side:
    """`jit(vmap(scan))`."""
    given = setup.folder / f"{workload.name}-{workload.lanes}.npz"
    write_given(workload, CHECKED, given)
    experiments, _ = workload.experiments()
    hyper = hyperparameters(experiments[0]) | {"steps": STEPS}
    arguments = {"name": workload.name, "given": str(given), "hyper": hyper, "batch_size": workload.batch_size}
    arguments["length"] = SCANNED[workload.name]
    environment = setup.caches.environment(f"{workload.name}-{workload.lanes}-jax")
    process = Process("jax_peer", arguments, environment, setup.python)
    figures: dict[str, Any] = {"compile": process.call("prepare")["compile_s"]}
    losses = {"jax": process.call("losses", steps=CHECKED)}
    if setup.thorough:
        process.close()
        alone = Process("jax_peer", arguments, environment | READABLE, setup.python)
        alone.call("prepare")
        figures["memory"] = alone.call("memory")
        alone.close()
        process = Process("jax_peer", arguments, environment, setup.python)
        figures["compile, cache warm"] = process.call("prepare")["compile_s"]
    return Side("jax", [Contestant("jax", [process])], losses, figures)


def modelbatch(workload: Workload, setup: Setup) -> Side:
    """`ModelBatch` and `OptimizerFactory`; threads as in `floor`."""
    arguments = {"workload": asdict(workload), "threads": setup.cores}
    figures: dict[str, Any] = {}
    contestants = []
    for policy in setup.policies:
        process = Process("modelbatch_peer", arguments, {kernels.WAIT: policy}, setup.python)
        figures[policy] = process.call("prepare")
        contestants.append(Contestant(f"modelbatch, threads wait {policy.lower()}", [process]))
    losses = {"modelbatch": process.call("losses", steps=CHECKED)}
    if setup.thorough:
        alone = Process("modelbatch_peer", arguments, READABLE | {kernels.WAIT: kernels.PASSIVE}, setup.python)
        alone.call("prepare")
        figures["memory"] = alone.call("memory")
        alone.close()
    return Side("modelbatch", contestants, losses, figures)


SIDES = {"plain": plain, "coalesced": coalesced, "jax": jax, "modelbatch": modelbatch, "floor": floor}

#: What a side needs that is not coalesce's own.
NEEDS = {"jax": ("jax", "optax"), "modelbatch": ("torch", "modelbatch")}


def missing(name: str, python: str) -> str:
    """Why a side is left out; empty if it is not."""
    needed = NEEDS.get(name, ())
    if not needed:
        return ""
    code = "import importlib.metadata as m, json, sys; json.dump({n: m.version(n) for n in sys.argv[1:]}, sys.stdout)"
    done = subprocess.run([python, "-c", code, *needed], capture_output=True, text=True)
    if done.returncode == 0 and json.loads(done.stdout):
        return ""
    return (
        f"{name} is left out: {python} lacks {' or '.join(needed)}. Install: pip install 'coalesce[bench]'; where they "
        f"live in an environment of their own, give its interpreter by --peer-python"
    )
