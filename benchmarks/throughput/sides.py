"""Each side brought up: what its first steps lose, what it compiles and takes, and its processes, ready to work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.throughput.place import Place
from benchmarks.throughput.plain import MODES
from benchmarks.throughput.processes import Caches, Contestant, Process
from benchmarks.throughput.workloads import PRIMER, STEPS, Workload, hyperparameters, write_given
from coalesce import kernels
from coalesce.memory.measure import READABLE

#: Steps whose losses all sides must agree on.
CHECKED = 4

#: What a kind of plain loop is called, where not by its own name. What stands before the comma is one peer.
NAMES = {"reduce-overhead": "compiled, reduce-overhead"}

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
        place: where all sides compute.
        graphs: coalesce's step is replayed as a CUDA graph.
        together: all sides prepare at once.
    """

    folder: Path
    caches: Caches
    cores: int
    counts: Sequence[int] = (1, 2, 4, 6)
    python: str = sys.executable
    compile: bool = True
    thorough: bool = True
    passive: bool = False
    place: Place = field(default_factory=Place)
    graphs: bool = False
    together: bool = False

    @property
    def policies(self) -> Sequence[str]:
        """How threads wait for each other: awake, asleep. A thread alone waits for nobody, nor does a GPU's host."""
        several = self.cores > 1 and not self.place.on_cuda
        return ("ACTIVE", kernels.PASSIVE) if several and not self.passive else (kernels.PASSIVE,)

    @property
    def kinds(self) -> Sequence[str]:
        """Of plain loops."""
        compiled = [kind for kind in MODES if self.place.on_cuda or kind == "compiled"]
        return ["eager", *compiled] if self.compile else ["eager"]

    def threads(self, count: int) -> int:
        """Of each of so many processes. On CUDA all have the same number: it stands in the compiler's guards."""
        return max(1, self.cores // (max(self.counts) if self.place.on_cuda else count))

    def waiting(self, policy: str) -> str:
        """The end of a contestant's name."""
        return "" if self.place.on_cuda else f", threads wait {policy.lower()}"

    def given(self, workload: Workload) -> dict[str, Any]:
        """What each process of torch's is told."""
        return {"workload": asdict(workload), "place": asdict(self.place)}

    def prime(self) -> float:
        """Prepare an empty compiler's cache, for all that begin with it; the seconds that it took."""
        self.caches.prime(self.given(PRIMER) | {"threads": self.cores})
        return self.caches.primed_s


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
    given = setup.given(workload)
    pool = [Process("plain", given | {"number": n}, environment) for n in range(max(setup.counts))]
    kinds = setup.kinds
    optimizer = pool[0].call("choose")
    figures: dict[str, Any] = {"optimizer": optimizer or "as torch takes it by itself"}
    # in turns: the first one compiles, the next one finds it in the cache
    seconds = []
    for some in [pool[:1], pool[1:]] if setup.together else [[process] for process in pool]:
        for process in some:
            threads = {setup.threads(c) for c in setup.counts if pool.index(process) < c}
            process.send("prepare", kinds=kinds, threads=sorted(threads), optimizer=optimizer)
        seconds += [process.receive() for process in some]
    if setup.compile:
        figures["compile"] = seconds[0]["compiled"]
        figures["compile, cache warm"] = seconds[-1]["compiled"] if len(pool) > 1 else None
    losses = {kind: pool[0].call("losses", steps=CHECKED, kind=kind) for kind in kinds}
    if setup.thorough:
        alone = Process("plain", given, environment | READABLE)
        alone.call("prepare", kinds=["eager"], threads=[1], optimizer=optimizer)
        figures["memory"] = alone.call("memory")
        alone.close()
    contestants = [
        Contestant(
            f"plain {NAMES.get(kind, kind)}, {count} process{'es' * (count > 1)}",
            pool[:count],
            {"kind": kind, "threads": setup.threads(count)},
        )
        for kind in kinds
        for count in setup.counts
    ]
    return Side("plain", contestants, losses, figures)


def coalesced(workload: Workload, setup: Setup) -> Side:
    """The product's own path."""
    environment = setup.caches.environment(f"{workload.name}-{workload.lanes}-coalesced")
    arguments = setup.given(workload) | {"threads": setup.cores, "compile": setup.compile, "graphs": setup.graphs}
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
    """The products alone; on the CPU with threads that wait asleep and threads that wait awake, whichever do better."""
    contestants = []
    figures: dict[str, Any] = {}
    for policy in setup.policies:
        process = Process("floor", setup.given(workload) | {"threads": setup.cores}, {kernels.WAIT: policy})
        figures[policy] = process.call("prepare")
        contestants.append(Contestant(f"floor{setup.waiting(policy)}", [process]))
    return Side("floor", contestants, {}, figures)


def jax_environment(place: Place) -> dict[str, str]:
    """What makes JAX compute there, as exactly. It would take most of a GPU's memory at once, and multiply in TF32."""
    if not place.on_cuda:
        return {}
    exact = "highest" if place.matmul in (None, "highest") else "tensorfloat32"
    return {
        "JAX_PLATFORMS": place.device,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_DEFAULT_MATMUL_PRECISION": exact,
    }


def jax(workload: Workload, setup: Setup) -> Side:
    """`jit(vmap(scan))`."""
    given = setup.folder / f"{workload.name}-{workload.lanes}.npz"
    write_given(workload, CHECKED, given)
    experiments, _ = workload.experiments()
    hyper = hyperparameters(experiments[0]) | {"steps": STEPS}
    arguments = {"name": workload.name, "given": str(given), "hyper": hyper, "batch_size": workload.batch_size}
    arguments["length"] = SCANNED[workload.name]
    environment = setup.caches.environment(f"{workload.name}-{workload.lanes}-jax") | jax_environment(setup.place)
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
    arguments = setup.given(workload) | {"threads": setup.cores}
    figures: dict[str, Any] = {}
    contestants = []
    for policy in setup.policies:
        process = Process("modelbatch_peer", arguments, {kernels.WAIT: policy}, setup.python)
        figures[policy] = process.call("prepare")
        contestants.append(Contestant(f"modelbatch{setup.waiting(policy)}", [process]))
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


def missing(name: str, python: str, place: Place | None = None, precision: str = "float32") -> str:
    """Why a side is left out; empty if it is not.

    Args:
        name: of the side.
        python: the interpreter that has the peers.
        place: where all sides compute; by default the CPU.
        precision: of the experiments.
    """
    needed = NEEDS.get(name, ())
    if not needed:
        return ""
    if name == "jax" and precision != "float32":
        return f"jax is left out: it is written in float32 here, not in {precision}"
    code = "import importlib.metadata as m, json, sys; json.dump({n: m.version(n) for n in sys.argv[1:]}, sys.stdout)"
    done = subprocess.run([python, "-c", code, *needed], capture_output=True, text=True)
    if done.returncode or not json.loads(done.stdout):
        return (
            f"{name} is left out: {python} lacks {' or '.join(needed)}. Install: pip install 'coalesce[bench]'; where "
            f"they live in an environment of their own, give its interpreter by --peer-python"
        )
    if name == "jax" and place is not None and place.on_cuda:
        look = [python, "-c", "import jax; jax.devices()"]
        done = subprocess.run(look, capture_output=True, text=True, env=os.environ | jax_environment(place))
        if done.returncode:
            return "jax is left out: it finds no GPU; it needs jax[cuda13] or jax[cuda12]"
    return ""
