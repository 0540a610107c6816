"""Run all parts, group by group: called by `benchmarks/gpu.sh`, which has the help.

Needs the standard library alone: what does not import is told as a part that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.gpu.parts import Order
from benchmarks.gpu.running import Outcome, run
from benchmarks.gpu.summary import lines, summary

#: Peers, and what they need.
PEERS = {"jax": ("jax", "optax"), "modelbatch": ("modelbatch",)}


def installed(names: tuple[str, ...]) -> bool:
    try:
        return all(version(name) for name in names)
    except PackageNotFoundError:
        return False


def main() -> int:
    """Run the command line.

    Returns:
        The exit code: 1 if a part failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--spent", type=float, default=0.0, help="seconds that were spent before")
    options = parser.parse_args()
    # so that the parts are ended too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic() - options.spent
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    peers = [name for name, needed in PEERS.items() if installed(needed)]
    outcomes: list[Outcome] = []

    def told(outcome: Outcome) -> None:
        how = f"failed ({outcome.rc})" if outcome.rc else "done"
        print(f"{time.monotonic() - began:5.0f} s  {outcome.name}: {how} in {outcome.seconds:.0f} s", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        order = Order(out, Path(scratch), options.device, options.quick, peers)
        environment = os.environ | {"COLUMNS": "140", "PYTHONUNBUFFERED": "1"}
        for group in order.groups():
            # each of many that compile at once takes a share of the processors
            workers = {"TORCHINDUCTOR_COMPILE_THREADS": "4"} if len(group) > 3 else {}
            outcomes += run(group, out, began + order.total_s, environment | workers, told)
    found = summary(out, outcomes)
    (out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines(found)))
    return int(any(outcome.rc for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
