"""Random numbers from the lane's own stream, where torch's functions would draw from a generator that all lanes share.

What a lane draws follows from its seed, the step and the number of the call within the step, and from nothing else. The
distributions are torch's, the numbers are not. Two words of 32 bits make a float64, one a float32, as fine as torch's
own; a normal number is a Box-Muller transform of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coalesce.engine.rules.leaves import require_grad
from coalesce.engine.rules.lines import user_line
from coalesce.engine.rules.mode import Rules, rule
from coalesce.errors import TaskError

# ATen's words for what torch returns where no dtype is given
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In what to compute: float32 for what is narrower, and for integers and booleans."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def random(rules: Rules, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uniform in [0, 1), of as many bits as the dtype's significand has."""
    count = math.prod(shape)
    if dtype == torch.float64:
        words = rules.bits(2 * count)
        whole = (words[:count] << 21) | (words[count:] >> 11)
        return (whole.to(dtype) * 2.0**-53).view(tuple(shape))
    digits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)
    return ((rules.bits(count) >> (32 - digits)).to(_wide(dtype)) * 2.0**-digits).view(tuple(shape)).to(dtype)


def positive(rules: Rules, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uniform in (0, 1], fine near 0, so that its logarithm has its whole tail. Float32 for what is narrower."""
    return ((rules.bits(math.prod(shape)).to(_wide(dtype)) + 0.5) * 2.0**-32).view(tuple(shape))


def exponential(rules: Rules, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Of rate 1, and above 0: its logarithm is finite. Float32 for what is narrower."""
    return (-positive(rules, shape, dtype).log()).clamp(min=2.0**-33)


def normal(rules: Rules, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Standard normal. Float32 for what is narrower."""
    count = math.prod(shape)
    pairs = (count + 1) // 2
    words = rules.bits(2 * pairs).to(_wide(dtype))
    radius = (-2 * ((words[:pairs] + 0.5) * 2.0**-32).log()).sqrt()
    angle = words[pairs:] * (2 * math.pi * 2.0**-32)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count].view(tuple(shape))


def below(rules: Rules, shape: Sequence[int], size: int) -> Tensor:
    """Integers in [0, size), int64. One word is even to one part in 2**16; where it is not, two are taken."""
    count = math.prod(shape)
    if not 1 <= size < 2**62:
        raise RuntimeError(f"random numbers from {size} values: there must be between 1 and 2**62")
    if size <= 2**16:
        return (rules.bits(count) * size >> 32).view(tuple(shape))
    words = rules.bits(2 * count)
    return (((words[:count] << 31) | (words[count:] >> 1)) % size).view(tuple(shape))


def _no_generator(name: str, generator: Any) -> None:
    if generator is not None:
        raise TaskError(
            f"{name}(generator=...) draws from a generator with a state, which a graph cannot move on. Leave it out: "
            f"then the numbers come from a stream that is keyed by the seed and the step.\n{user_line()}"
        )


def write(target: Tensor, value: Tensor) -> Tensor:
    """Write into a tensor, as a function whose name ends in an underscore does."""
    return target.copy_(value)


# ---- factories ----


def _size(size: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape that ``torch.rand(2, 3)`` or ``torch.rand((2, 3))`` was given."""
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)


def _finish(rules: Rules, value: Tensor, dtype: torch.dtype | None, name: str, options: dict[str, Any]) -> Tensor:
    """What a factory's options ask for.

    Raises:
        TypeError: options that have no sense here.
    """
    _no_generator(name, options.pop("generator", None))
    device, requires_grad = options.pop("device", None), options.pop("requires_grad", False)
    for harmless in ("pin_memory", "layout", "memory_format"):
        options.pop(harmless, None)
    if any(v is not None for v in options.values()):
        raise TypeError(f"{name}() from a keyed stream does not know {', '.join(options)}")
    value = value.to(dtype or torch.get_default_dtype())
    if device is not None:
        value = value.to(device)
    return require_grad(value) if requires_grad else value


def _factory(name: str, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def handler(rules: Rules, *size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        shape = _size((options.pop("size"),)) if "size" in options else _size(size)
        value = draw(rules, shape, dtype or torch.get_default_dtype())
        return _finish(rules, value, dtype, name, options)

    return handler


def _like(name: str, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def handler(rules: Rules, input: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        dtype = dtype or input.dtype
        options.setdefault("device", input.device)
        return _finish(rules, draw(rules, input.shape, dtype), dtype, name, options)

    return handler


for _name, _draw in (("rand", random), ("randn", normal)):
    rule(getattr(torch, _name))(_factory(_name, _draw))
    rule(getattr(torch, f"{_name}_like"))(_like(f"{_name}_like", _draw))


@rule(torch.randint)
def randint(rules: Rules, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    names = [n for n in ("low", "high", "size") if n not in options]
    # the lower end may be left out
    given = {**dict(zip(names if len(args) == len(names) else names[1:], args, strict=False)), **options}
    low, high, size = given.pop("low", 0), given.pop("high"), given.pop("size")
    value = below(rules, tuple(size), high - low) + low
    return _finish(rules, value, dtype or torch.int64, "randint", given)


@rule(torch.randint_like)
def randint_like(rules: Rules, input: Tensor, *args: int, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    low, high = args if len(args) == 2 else (options.pop("low", 0), args[0] if args else options.pop("high"))
    options.setdefault("device", input.device)
    value = below(rules, input.shape, high - low) + low
    return _finish(rules, value, dtype or input.dtype, "randint_like", options)


@rule(torch.randperm)
def randperm(rules: Rules, n: int, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    # 63 bits: no two keys are equal
    words = rules.bits(2 * n)
    order = torch.argsort((words[:n] << 31) | (words[n:] >> 1))
    return _finish(rules, order, dtype or torch.int64, "randperm", options)


# ---- samples of given probabilities ----


@rule(torch.bernoulli, torch.Tensor.bernoulli)
def bernoulli(rules: Rules, input: Tensor, p: Any = None, *, generator: Any = None) -> Tensor:
    _no_generator("bernoulli", generator)
    return (random(rules, input.shape, _wide(input.dtype)) < (input if p is None else p)).to(input.dtype)


@rule(torch.multinomial, torch.Tensor.multinomial)
def multinomial(
    rules: Rules, input: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    _no_generator("multinomial", generator)
    weight = input.to(_wide(input.dtype))
    if not replacement:
        # The race of exponentials: the first of them to end comes first in a sample without replacement.
        times = exponential(rules, weight.shape, weight.dtype)
        return (weight / times).topk(num_samples, -1).indices
    reached = weight.cumsum(-1)
    draw = random(rules, (*weight.shape[:-1], num_samples), weight.dtype) * reached[..., -1:]
    # The first whose cumulated weight exceeds the draw, which has a weight of its own. The product may round up to
    # the whole; then it is the last one with a weight.
    found = (reached[..., None, :] <= draw[..., None]).sum(-1)
    last = (reached < reached[..., -1:]).sum(-1, keepdim=True)
    return torch.minimum(found, last)


@rule(torch.normal)
def normal_of(rules: Rules, mean: Any, std: Any = 1.0, size: Any = None, *, generator: Any = None, **kw: Any) -> Tensor:
    if size is not None:
        dtype = kw.pop("dtype", None)
        value = normal(rules, tuple(size), dtype or torch.get_default_dtype()) * std + mean
        return _finish(rules, value, dtype, "normal", {"generator": generator, **kw})
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    shape = torch.broadcast_shapes(*[t.shape for t in tensors])
    value = normal(rules, shape, tensors[0].dtype) * std + mean
    return _finish(rules, value, tensors[0].dtype, "normal", {"generator": generator, **kw})


# ---- in place ----


def _in_place(method: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """The rule of a method that fills a tensor; the function below it says with what, in float32 or float64."""

    def register(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @rule(method)
        def handler(rules: Rules, self: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
            _no_generator(method.__name__, generator)
            return write(self, fill(rules, self, *args, **kwargs))

        return fill

    return register


@_in_place(Tensor.uniform_)
def uniform_(rules: Rules, self: Tensor, a: Any = 0.0, b: Any = 1.0, **ends: Any) -> Tensor:
    # torch calls the ends `from` and `to`
    a, b = ends.get("from", a), ends.get("to", b)
    return random(rules, self.shape, _wide(self.dtype)) * (b - a) + a


@_in_place(Tensor.normal_)
def normal_(rules: Rules, self: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    return normal(rules, self.shape, self.dtype) * std + mean


@_in_place(Tensor.log_normal_)
def log_normal_(rules: Rules, self: Tensor, mean: Any = 1.0, std: Any = 2.0) -> Tensor:
    return (normal(rules, self.shape, self.dtype) * std + mean).exp()


@_in_place(Tensor.exponential_)
def exponential_(rules: Rules, self: Tensor, lambd: Any = 1.0) -> Tensor:
    return exponential(rules, self.shape, self.dtype) / lambd


@_in_place(Tensor.cauchy_)
def cauchy_(rules: Rules, self: Tensor, median: Any = 0.0, sigma: Any = 1.0) -> Tensor:
    return (math.pi * (positive(rules, self.shape, self.dtype) - 0.5)).tan() * sigma + median


@_in_place(Tensor.geometric_)
def geometric_(rules: Rules, self: Tensor, p: Any) -> Tensor:
    draw = positive(rules, self.shape, self.dtype)
    log = torch.log1p(-p) if isinstance(p, Tensor) else math.log1p(-p)
    return (draw.log() / log).ceil().clamp(min=1)


@_in_place(Tensor.bernoulli_)
def bernoulli_(rules: Rules, self: Tensor, p: Any = 0.5) -> Tensor:
    return random(rules, self.shape, _wide(self.dtype)) < p


@_in_place(Tensor.random_)
def random_(rules: Rules, self: Tensor, *ends: int, to: int | None = None, **low: int) -> Tensor:
    given = [*([low["from"]] if "from" in low else []), *ends, *([] if to is None else [to])]
    if not given:
        # every whole number that the dtype holds, up to its largest; for floats, as far as they hold all of them
        floats = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
        most = torch.iinfo(self.dtype).max if self.dtype in _INTEGERS else 2 ** floats.get(self.dtype, 0)
        given = [min(most, 2**62 - 2) + 1]
    start, stop = given if len(given) == 2 else (0, given[0])
    return below(rules, self.shape, stop - start) + start


@rule(torch.nn.init.uniform_)
def init_uniform_(rules: Rules, tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Tensor:
    with torch.no_grad(), rules:
        return tensor.uniform_(a, b, generator=generator)


@rule(torch.nn.init.normal_)
def init_normal_(rules: Rules, tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Tensor:
    with torch.no_grad(), rules:
        return tensor.normal_(mean, std, generator=generator)
