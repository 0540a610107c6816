"""The step of all lanes as one CUDA graph. Of the ruler alone, to see what an option for it would gain.

The compiler's own graphs (``triton.cudagraphs``, which is what ``mode="reduce-overhead"`` sets) do not take the step,
since it writes into its inputs. But the lanes' state stays where it is, and the samples of a batch are the one input
that is another tensor at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from benchmarks.throughput import recorded
from coalesce.engine import lanes
from coalesce.engine.tape import Tape

#: What a first call goes through, and what makes a recording of a call; the recorded call is not carried out.
Recorder = tuple[Callable[[recorded.Call], None], Callable[[recorded.Call], Callable[[], None]]]


class Replayed(Tape):
    """A tape whose first call is an ordinary one; the second is recorded, and replayed from then on.

    It is recorded anew where one of its inputs is another tensor than before.
    """

    recorder: Recorder = (recorded.warm, recorded.record)

    @classmethod
    def of_lanes(
        cls, module: fx.GraphModule, inputs: Sequence[Tensor], names: Sequence[str], constants: int, compile: bool
    ) -> Tape:
        tape: Any = super().of_lanes(module, inputs, names, constants, compile)
        # the samples stand behind the state
        tape._varies, tape._fixed, tape._replay = len(names), (), None
        return tape

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Run the segments.

        Raises:
            RuntimeError: the tape gives results, which a replay would overwrite.
        """
        at = self._varies
        fixed = (*inputs[:at], *inputs[at + 1 :])
        warm, record = self.recorder
        if len(fixed) != len(self._fixed) or any(a is not b for a, b in zip(fixed, self._fixed, strict=True)):
            if self._results:
                raise RuntimeError("only a step, which writes all that it computes into its inputs, can be replayed")
            self._fixed, self._replay = fixed, None
            run = super().__call__
            warm(lambda: run(*inputs))
            return []
        if self._replay is None:
            run, self._samples = super().__call__, inputs[at].clone()
            whole = (*inputs[:at], self._samples, *inputs[at + 1 :])
            self._replay = record(lambda: run(*whole))
        self._samples.copy_(inputs[at])
        self._replay()
        return []

    _varies: int
    _fixed: tuple[Tensor, ...]
    _samples: Tensor
    _replay: Callable[[], None] | None


def install() -> None:
    """Let all lanes of this process step so."""
    lanes.Tape = Replayed  # type: ignore[misc]
