"""Ways to convolve in lanes, beside vmap's own. All of them give the same numbers, to rounding.

Shapes: K lanes, B batch, C channels in, O channels out; ``…`` is the spatial dimensions, L of the input, M of the
output, k of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_GRADIENT = torch.ops.aten.convolution_backward

#: Channels that fill the CPU's vectors.
FULL = 16


@dataclass(frozen=True)
class Convolution:
    """What decides how fast a convolution is, but for the batch and the number of lanes.

    Args:
        input: (C, L…) of one sample.
        weight: (O, C / groups, k…), or (C, O / groups, k…) where it is transposed.
        stride, padding, dilation, output_padding: of each spatial dimension.
        dtype: what is computed in.
    """

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool
    dtype: str

    def __str__(self) -> str:
        """Under which a plan knows it."""
        usual = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
        settings = {name: getattr(self, name) for name in usual}
        words = [f"{n}={_text(v)}" for n, v in settings.items() if set(v) != {usual[n]}]
        words += [f"groups={self.groups}"] if self.groups > 1 else []
        kind = f"conv{'_transpose' if self.transposed else ''}{len(self.stride)}d"
        return " ".join([kind, f"input={_text(self.input)}", f"weight={_text(self.weight)}", *words, self.dtype])

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of `aten.convolution` behind the bias, and of its gradient behind the bias' sizes."""
        settings = self.stride, self.padding, self.dilation, self.transposed, self.output_padding
        return *(list(s) if isinstance(s, tuple) else s for s in settings), self.groups

    @property
    def output(self) -> tuple[int, ...]:
        """(O, M…) of one sample."""
        example = torch.empty(1, *self.input, device="meta"), torch.empty(self.weight, device="meta")
        return tuple(torch.ops.aten.convolution(*example, None, *self.arguments).shape[1:])

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        """torch's own: (B, C, L…), weight → (B, O, M…)."""
        return torch.ops.aten.convolution(x, weight, None, *self.arguments)


def _text(numbers: Sequence[int]) -> str:
    return "x".join(map(str, numbers))


class Seen(NamedTuple):
    """A convolution in a plain step: of how many samples, and whether its input has a gradient."""

    convolution: Convolution
    batch: int
    needs_gradient: bool


class Lowering(NamedTuple):
    """A way to convolve.

    Args:
        run: (B, C, L…), weight, convolution → (B, O, M…), of one lane.
        fits: whether it can do a convolution.
        elements: of the largest tensor of its own that it makes for one sample.
    """

    run: Callable[[Tensor, Tensor, Convolution], Tensor]
    fits: Callable[[Convolution], bool]
    elements: Callable[[Convolution], int]


class Single(torch.autograd.Function):
    """One call of torch's convolution for each lane; ``last``: of images whose channels lie beside each other in
    memory. What comes and what goes lies as ever: a compiler has whoever makes it write it where it is wanted."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, convolution: Convolution, last: bool) -> Tensor:
        return convolution.plain(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.convolution, ctx.last = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        wanted = ctx.needs_input_grad[:2]
        found = iter(SingleGradient.apply(gradient, *ctx.saved_tensors, ctx.convolution, ctx.last, wanted))
        return *(next(found) if one else None for one in wanted), None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, weight: Tensor, convolution: Convolution, last: bool) -> Any:
        x, weight = _stack((x, weight), dims, info.batch_size)
        found = torch.ops.coalesce.convolutions(_to_last(x, last), weight, *convolution.arguments, last)
        return _from_last(found, last), 0


class SingleGradient(torch.autograd.Function):
    """The gradients of one convolution: those that are ``wanted`` of the input's and the weight's."""

    @staticmethod
    def forward(
        gradient: Tensor, x: Tensor, weight: Tensor, convolution: Convolution, last: bool, wanted: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        return tuple(_gradients(gradient, x, weight, convolution.arguments, wanted))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.convolution, _, ctx.wanted = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        def first(g: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            both = torch.func.vjp(ctx.convolution.plain, *inputs)[1](g)
            return tuple(one for one, wanted in zip(both, ctx.wanted, strict=True) if wanted)

        return *torch.func.vjp(first, *ctx.saved_tensors)[1](gradients), None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> Any:
        *tensors, convolution, last, wanted = args
        gradient, x, weight = _stack(tensors, dims, info.batch_size)
        images = _to_last(gradient, last), _to_last(x, last)
        found = torch.ops.coalesce.convolutions_gradients(*images, weight, *convolution.arguments, last, [*wanted])
        if wanted[0]:
            found[0] = _from_last(found[0], last)
        return tuple(found), (0,) * len(found)


def _stack(tensors: Sequence[Tensor], dims: Sequence[int | None], lanes: int) -> list[Tensor]:
    pairs = zip(tensors, dims, strict=False)
    return [t.expand(lanes, *t.shape) if d is None else t.movedim(d, 0) for t, d in pairs]


def _to_last(x: Tensor, last: bool) -> Tensor:
    """(K, B, C, L…) as (K, B, L…, C)."""
    return x.movedim(2, -1).contiguous() if last else x


def _from_last(x: Tensor, last: bool) -> Tensor:
    return x.movedim(-1, 2).contiguous() if last else x


def _gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, arguments: Sequence[Any], wanted: Sequence[bool]
) -> list[Tensor]:
    found = _GRADIENT(gradient, x, weight, None, *arguments, [*wanted, False])
    return [one for one, is_wanted in zip(found, wanted, strict=False) if is_wanted]


#: `Convolution.arguments`, as an operator takes them, and whether channels come last.
_ARGUMENTS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, "
    "bool last"
)


# One operator each, so that a graph of sixty lanes has one call to compile, and blocks that look alike are alike.
@torch.library.custom_op(
    "coalesce::convolutions", mutates_args=(), schema=f"(Tensor x, Tensor weight, {_ARGUMENTS}) -> Tensor"
)
def _convolutions(x: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    """(K, B, C, L…), (K, *weight) → (K, B, O, M…); with channels last (K, B, L…, C) → (K, B, M…, O)."""
    *settings, last = arguments
    found = torch.empty(0)
    for lane, (image, kernel) in enumerate(zip(_channels(x, last).unbind(), weight.unbind(), strict=True)):
        one = torch.ops.aten.convolution(image, kernel, None, *settings)
        one = one.movedim(1, -1) if last else one
        if lane == 0:
            found = one.new_empty((x.shape[0], *one.shape))
        # at once, while it is in the cache
        found[lane].copy_(one)
    return found


@_convolutions.register_fake
def _(x: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    *settings, last = arguments
    one = torch.ops.aten.convolution(_channels(x, last)[0], weight[0], None, *settings)
    return x.new_empty((x.shape[0], *(one.movedim(1, -1) if last else one).shape))


@torch.library.custom_op(
    "coalesce::convolutions_gradients",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor x, Tensor weight, {_ARGUMENTS}, bool[] wanted) -> Tensor[]",
)
def _convolutions_gradients(gradient: Tensor, x: Tensor, weight: Tensor, *arguments: Any) -> list[Tensor]:
    """(K, B, O, M…), (K, B, C, L…), (K, *weight) → those of the input's and the weight's gradient that are wanted; with
    channels last as `_convolutions`."""
    *settings, last, wanted = arguments
    found = [t.new_empty(t.shape) for t, is_wanted in zip((x, weight), wanted, strict=True) if is_wanted]
    # as torch's are
    places = [_channels(t, last and place == 0 and wanted[0]) for place, t in enumerate(found)]
    lanes = zip(_channels(gradient, last).unbind(), _channels(x, last).unbind(), weight.unbind(), strict=True)
    for lane, tensors in enumerate(lanes):
        for place, one in zip(places, _gradients(*tensors, settings, wanted), strict=True):
            place[lane].copy_(one)
    return found


@_convolutions_gradients.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, *arguments: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, wanted in zip((x, weight), arguments[-1], strict=True) if wanted]


def _channels(x: Tensor, last: bool) -> Tensor:
    """(K, B, L…, C) as (K, B, C, L…), if channels come last."""
    return x.movedim(-1, 2) if last else x


class Columns(torch.autograd.Function):
    """The patches as columns of a matrix, and one product.

    The columns are made again for the weight's gradient, so that nobody keeps them, k times the input, meanwhile.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, convolution: Convolution) -> Tensor:
        outside = convolution.output[1:]
        product = weight.flatten(1) @ _columns(x, convolution)
        return product.unflatten(1, (x.shape[0], *outside)).transpose(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.convolution = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradient.transpose(0, 1).flatten(1)
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = _back(weight.flatten(1).transpose(0, 1) @ gradient, x.shape[0], ctx.convolution)
        if ctx.needs_input_grad[1]:
            to_weight = (gradient @ _columns(x, ctx.convolution).transpose(0, 1)).view_as(weight)
        return to_x, to_weight, None


def _columns(x: Tensor, convolution: Convolution) -> Tensor:
    """(B, C, L…) → (C · k…, B · M…): what the kernel sees at each place."""
    dims = len(convolution.stride)
    x = F.pad(x, [p for padding in reversed(convolution.padding) for p in (padding, padding)])
    sizes = convolution.weight[2:]
    for dim, (k, step, spread) in enumerate(zip(sizes, convolution.stride, convolution.dilation, strict=True)):
        x = x.unfold(2 + dim, spread * (k - 1) + 1, step)[..., ::spread]
    kernel, outside = range(2 + dims, 2 + 2 * dims), range(2, 2 + dims)
    return x.permute(1, *kernel, 0, *outside).flatten(1 + dims).flatten(0, dims)


def _back(columns: Tensor, batch: int, convolution: Convolution) -> Tensor:
    """(C · k…, B · M…) → (B, C, L…): every entry added up where it was taken from, one spatial dimension after the
    other."""
    channels, *size = convolution.input
    kernel, outside = convolution.weight[2:], convolution.output[1:]
    x = columns.reshape(channels, *kernel, batch, *outside)
    settings = zip(size, convolution.stride, convolution.padding, convolution.dilation, strict=True)
    for dim, setting in enumerate(settings):
        # (C, k of this dimension, k of the rest, B, M of this dimension, M of the rest, L of those before)
        taps = x.movedim(2 + len(size) - dim, -1).unbind(1)
        x = _overlap(taps, *setting)
    return x.transpose(0, 1)


def _overlap(taps: Sequence[Tensor], size: int, stride: int, padding: int, dilation: int) -> Tensor:
    """Add up what each tap of a kernel saw, (…, M) each, at the places where it saw it: (…, L).

    Place p = stride · (m + q) + r for output m: taps of one r only shift, by q, and lie beside those of another.
    """
    rows = -(-size // stride)
    phases: list[Tensor | None] = [None] * stride
    for number, tap in enumerate(taps):
        shift, r = divmod(number * dilation - padding, stride)
        # a negative pad cuts off what lies in the padding
        moved = F.pad(tap, (shift, rows - shift - tap.shape[-1]))
        before = phases[r]
        phases[r] = moved if before is None else before + moved
    found = next(phase for phase in phases if phase is not None)
    whole = torch.stack([torch.zeros_like(found) if phase is None else phase for phase in phases], -1)
    return whole.flatten(-2)[..., :size]


def _channels_may_be_last(convolution: Convolution) -> bool:
    """Whether the CPU's library, oneDNN of torch 2.11 and 2.13, has its faster kernels there, and they are sound: those
    of a strided 1 x 1 convolution write beyond their memory where the channels fill no vector, and in bfloat16 compute
    wrong gradients for some dilations, which mean nothing there."""
    c = convolution
    strided = math.prod(c.weight[2:]) == 1 and math.prod(c.stride) > 1
    sound = not strided or (c.input[0] % FULL == 0 and c.dtype == "float32" and math.prod(c.dilation) == 1)
    return len(c.stride) == 2 and c.groups == 1 and not c.transposed and sound


LOWERINGS: dict[str, Lowering] = {
    "single": Lowering(lambda *given: Single.apply(*given, False), lambda c: True, lambda c: math.prod(c.output)),
    "channels_last": Lowering(
        lambda *given: Single.apply(*given, True), _channels_may_be_last, lambda c: math.prod(c.output)
    ),
    "columns": Lowering(
        Columns.apply,
        lambda c: not c.transposed and c.groups == 1,
        lambda c: math.prod(c.weight[1:]) * math.prod(c.output[1:]),
    ),
}
