"""What the order of the samples costs: the keyed shuffle in a graph, and an argsort of random words per epoch.

    python -m benchmarks.shuffle [--lanes 64] [--batch 64] [--samples 1297]

Nanoseconds per sample that a lane is given, on one thread, in turns; the argsort is shared out over the samples of its
epoch. The seconds to compile are wall time from an empty cache.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch._inductor.config
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.func import vmap

from coalesce.engine.compiling import compile_graph
from coalesce.engine.trace import trace
from coalesce.random import Purpose, bits, key_of, shuffled

ROUNDS, CALLS = 10, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1297)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keys = torch.stack([key_of(seed) for seed in range(options.lanes)])
    position = torch.arange(options.batch).expand(options.lanes, -1).contiguous()

    def shuffle(keys: Tensor, position: Tensor) -> list[Tensor]:
        return [vmap(lambda k, p: shuffled(k, p, options.samples))(keys, position)]

    def words(keys: Tensor, epoch: Tensor) -> list[Tensor]:
        return [vmap(lambda k, e: bits(k, Purpose.ORDER, e, 0, options.samples))(keys, epoch)]

    epoch = torch.zeros(options.lanes, dtype=torch.int64)
    with torch._inductor.config.patch(force_disable_caches=True):
        compile_graph(trace(lambda k: [k + 1], [keys]), [keys])  # the first compilation probes the processor
        compiled = []
        for function, inputs in ((shuffle, [keys, position]), (words, [keys, epoch])):
            started = time.perf_counter()
            compiled.append(compile_graph(trace(function, inputs), inputs))
            compile_s = time.perf_counter() - started
            if function is shuffle:
                shuffle_s = compile_s
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(CALLS):
            compiled[0](keys, position)
        best[0] = min(best[0], (time.perf_counter() - started) / CALLS / position.numel())
        started = time.perf_counter()
        (drawn,) = compiled[1](keys, epoch)
        drawn.argsort(stable=True)
        best[1] = min(best[1], (time.perf_counter() - started) / drawn.numel())
    table = Table("", "ns per sample", "compile, s")
    table.add_row("keyed shuffle, in the graph", f"{best[0] * 1e9:.0f}", f"{shuffle_s:.1f}")
    table.add_row("argsort, once per epoch", f"{best[1] * 1e9:.0f}", f"{compile_s:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
