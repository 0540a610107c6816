"""Whether two ways of one computation agree: up to what rounding makes of it, which is measured where in doubt.

No fixed tolerance would do. The gradient of a bias in front of BatchNorm is zero in mathematics and noise in numbers,
of which Adam makes whole updates; two samples whose scores are equal but for rounding change an accuracy; autocast
rounds to bfloat16 what is stored in float32. So what is not equal to a small share of its size is computed again from
weights that are shifted in their last bits, several times: what rounding can do, these shifts do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Name → value: "train/loss", "buffer/1.running_mean", "slot/exp_avg/0.weight", "update/0.weight".
Outcome = dict[str, Tensor]
#: The entry of an outcome that says whether the step broke; all others are missing where it did.
DIVERGES = "whether it diverges"
#: Changes a model's weights in place, or does not.
Shift = Callable[[nn.Module], None]

#: So many times the root of the dtype's precision may a tensor's difference be, relative to its norm: 1e-3 in float32,
#: where a few operations give 1e-6. For coarser dtypes it is bounded: there the measured rounding counts.
_ROOTS = 3.0
_MOST = 0.02

#: A tensor's norm counts as at least this share of the largest one of its kind; the value of a metric as at least this.
_SHARE = 1e-2

#: Shifts of the weights, their size in units of the precision, and how much more than these do a fault makes. A
#: difference that comes from one coin, such as the sign of a single entry that is noise, is missed by so many shifts
#: once in 2^8.
_SHIFTS = 8
_UNITS = 4.0
_MARGIN = 4.0


def disagreeing(found: Outcome, compute: Callable[[Shift], Outcome], model: nn.Module, samples: int) -> list[str]:
    """The names of the values that are not what a plain computation gives.

    Args:
        found: what is doubted.
        compute: the plain computation, with weights that it passes through its argument first.
        model: whose weights these are.
        samples: over which metrics are means: where scores are equal but for rounding, their order is not decided, and
            a metric that counts samples may differ by two of them.
    """
    expected = compute(lambda model: None)
    precision = _precision(p.dtype for p in model.parameters())
    largest: dict[str, float] = {}
    for name, value in expected.items():
        largest[_kind(name)] = max(largest.get(_kind(name), 0.0), _size(value))
    apart = {n: _apart(found[n], v) if n in found else torch.inf for n, v in expected.items()}
    apart |= dict.fromkeys(found.keys() - expected.keys(), torch.inf)
    scale = {n: _scale(n, v, largest) for n, v in expected.items()}

    def beyond(name: str, more: float = 0.0) -> bool:
        tolerance = min(_ROOTS * precision**0.5, _MOST)
        return apart[name] > tolerance * scale.get(name, 0.0) + more

    wrong = [n for n in apart if beyond(n) and not _miscounted(n, found, expected, samples)]
    if not wrong:
        return []
    with _Precision() as seen:
        compute(lambda model: None)
    precision = max(precision, _precision(seen.dtypes))
    spread = dict.fromkeys(wrong, 0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(_SHIFTS):
        shifted = compute(lambda model: _shift(model, _UNITS * precision, generator))
        for name in wrong:
            same = name in shifted and name in expected
            spread[name] = max(spread[name], _apart(shifted[name], expected[name]) if same else torch.inf)
    wrong = [n for n in wrong if beyond(n, _MARGIN * spread[n])]
    return [DIVERGES] if DIVERGES in wrong else wrong


def _kind(name: str) -> str:
    """Slots of one name are compared with each other, and so are the changes of all parameters, and buffers of one
    name in several modules; a metric is of a kind of its own."""
    first, _, rest = name.partition("/")
    return {"slot": f"slot/{rest.partition('/')[0]}", "update": "update", "buffer": rest.rpartition(".")[2]}.get(
        first, name
    )


def _scale(name: str, value: Tensor, largest: Mapping[str, float]) -> float:
    least = _SHARE * largest[_kind(name)]
    if not name.startswith(("slot/", "update/", "buffer/")):
        least = _SHARE
    return max(_size(value), least)


def _size(value: Tensor) -> float:
    value = value.double()
    return float(torch.linalg.vector_norm(torch.where(torch.isfinite(value), value, 0.0)))


def _apart(a: Tensor, b: Tensor) -> float:
    """The norm of a difference; infinite where one is finite and the other is not."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.linalg.vector_norm(torch.where(same, 0.0, a - b)).nan_to_num(nan=torch.inf, posinf=torch.inf))


def _miscounted(name: str, found: Outcome, expected: Outcome, samples: int) -> bool:
    """Whether a metric counts samples, in a sum or a mean, and differs by two of them at most."""
    other = name in (DIVERGES, "train/loss") or name.startswith(("slot/", "update/", "buffer/"))
    if other or name not in found or name not in expected:
        return False
    a, b = float(found[name]), float(expected[name])
    for scale in (1, samples):
        whole = round(a * scale, 3), round(b * scale, 3)
        if all(w == w // 1 for w in whole) and abs(whole[0] - whole[1]) <= 2:
            return True
    return False


def _precision(dtypes: Any) -> float:
    """The coarsest of some dtypes' precisions; float32's for none."""
    return max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=1.2e-7)


def _shift(model: nn.Module, unit: float, generator: torch.Generator) -> None:
    """Change weights and buffers in their last bits."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
                # by a factor: a variance stays above zero, a zero stays one
                tensor.copy_(tensor.double() * (1 + unit * noise))


class _Precision(TorchFunctionMode):
    """Notes the dtypes in which a computation goes on: under autocast they are not those of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.dtypes |= {t.dtype for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor)}
        return out
