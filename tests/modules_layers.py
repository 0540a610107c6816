"""Rows of the table of modules: what multiplies, normalises, drops, pools and bends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from module_table import Row, rows


class Net(nn.Module):
    """Linear(6, 6), what stands between, Linear(…, 2), and whatever else is given by name."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], width: int = 6, **parts: Any):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(width, 2)
        self.between = between
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x)).flatten(1))


class Beside(nn.Module):
    """Several layers beside each other, each on the same activation of a shape, their outputs weighed and joined."""

    def __init__(self, shape: tuple[int, ...], *layers: nn.Module):
        super().__init__()
        self.shape = shape
        self.first = nn.Linear(6, torch.Size(shape).numel())
        self.layers = nn.ModuleList(layers)
        self.weights = nn.Parameter(torch.linspace(0.5, 1.5, len(layers)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).view(-1, *self.shape)
        return torch.cat([layer(h).flatten(1) * w for layer, w in zip(self.layers, self.weights, strict=True)], 1)


def bilinear(a: Any) -> nn.Module:
    return Net(lambda net, h: torch.tanh(net.pair(h, torch.sin(h))), width=4, pair=nn.Bilinear(6, 6, 4))


rows(
    Row("Linear", lambda a: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2, bias=False))),
    Row("Bilinear", bilinear),
)

# ---- convolution ----

rows(
    Row(
        "Conv1d and transposed",
        lambda a: Beside(
            (4, 7),
            nn.Conv1d(4, 6, 3, padding=1),
            nn.Conv1d(4, 4, 3, stride=2, dilation=2, padding=2, groups=2, bias=False, padding_mode="circular"),
            nn.Conv1d(4, 3, 5, padding="same"),
            nn.ConvTranspose1d(4, 3, 3, stride=2, padding=1, output_padding=1),
        ),
    ),
    Row(
        "Conv2d and transposed",
        lambda a: Beside(
            (2, 5, 4),
            nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)),
            nn.Conv2d(2, 4, 3, padding=1, groups=2, padding_mode="reflect"),
            nn.ConvTranspose2d(2, 4, 3, stride=2, groups=2, bias=False),
        ),
    ),
    Row(
        "Conv3d and transposed",
        lambda a: Beside(
            (2, 3, 4, 3), nn.Conv3d(2, 2, 2, padding=1), nn.ConvTranspose3d(2, 2, 2, stride=2, dilation=1)
        ),
    ),
)

# ---- normalisation ----

rows(
    Row(
        "BatchNorm1d",
        lambda a: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(a), nn.Linear(5, 2)),
        zero=("0.bias",),
        compiled=True,
    ),
    Row(
        "BatchNorm, cumulative, eps and momentum ride",
        lambda a: nn.Sequential(
            nn.Linear(6, 8, bias=False),
            nn.BatchNorm1d(8, momentum=None),
            nn.Unflatten(1, (2, 2, 2)),
            nn.Tanh(),
            nn.BatchNorm2d(2, momentum=a, eps=a / 10),
            nn.Tanh(),
            nn.Unflatten(1, (1, 2)),
            nn.BatchNorm3d(1, eps=a, affine=False),
            nn.Flatten(),
        ),
    ),
    Row(
        "BatchNorm without statistics",
        lambda a: nn.Sequential(
            nn.Linear(6, 8, bias=False),
            nn.BatchNorm1d(8, track_running_stats=False),
            nn.Unflatten(1, (2, 2, 2)),
            nn.Tanh(),
            nn.BatchNorm2d(2, affine=False, momentum=0.3),
            nn.Flatten(),
            nn.Linear(8, 2),
        ),
        slow=True,
    ),
    Row(
        "LayerNorm, GroupNorm, RMSNorm, LocalResponseNorm",
        lambda a: Beside(
            (4, 3),
            nn.LayerNorm(3),
            nn.LayerNorm((4, 3), bias=False),
            nn.LayerNorm(3, elementwise_affine=False, eps=a),
            nn.GroupNorm(2, 4),
            nn.GroupNorm(4, 4, affine=False, eps=a),
            nn.RMSNorm(3),
            nn.RMSNorm((4, 3), eps=a),
            nn.LocalResponseNorm(2),
            nn.LocalResponseNorm(3, alpha=a, beta=a, k=2 * a),
        ),
    ),
    Row(
        "InstanceNorm",
        lambda a: nn.Sequential(
            nn.Linear(6, 24),
            nn.Unflatten(1, (4, 6)),
            nn.InstanceNorm1d(4, affine=True),
            nn.Tanh(),
            nn.Unflatten(2, (3, 2)),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
            nn.Tanh(),
            nn.Unflatten(1, (2, 2)),
            nn.InstanceNorm3d(2, track_running_stats=True, momentum=a, eps=a),
            nn.Flatten(),
            nn.Linear(24, 2),
        ),
    ),
)

# ---- dropout ----

rows(
    Row(
        "Dropout",
        lambda a: Beside(
            (3, 4),
            nn.Dropout(a),
            nn.Dropout(0.5),
            nn.Dropout1d(a),
            nn.AlphaDropout(a),
            nn.AlphaDropout(0.25),
            nn.FeatureAlphaDropout(a),
            nn.Sequential(nn.Unflatten(2, (2, 2)), nn.Dropout2d(a)),
            nn.Sequential(nn.Unflatten(2, (2, 2, 1)), nn.Dropout3d(a)),
            nn.Sequential(nn.SiLU(), nn.Dropout(a, inplace=True)),
        ),
        compiled=True,
        thorough=True,
    ),
)

# ---- pooling ----


class Unpool(nn.Module):
    """Down, and up again to where the maxima came from."""

    def __init__(self, kind: int):
        super().__init__()
        self.down = getattr(nn, f"MaxPool{kind}d")(2, return_indices=True)
        self.up = getattr(nn, f"MaxUnpool{kind}d")(2)

    def forward(self, x: Tensor) -> Tensor:
        pooled, places = self.down(x)
        return self.up(pooled.sin(), places)


rows(
    Row(
        "pooling, 1d",
        lambda a: Beside(
            (2, 8),
            nn.MaxPool1d(3, 2, 1, dilation=2),
            nn.AvgPool1d(3, 2, 1, ceil_mode=True),
            nn.LPPool1d(2, 2),
            nn.AdaptiveMaxPool1d(3),
            nn.AdaptiveAvgPool1d(3),
            Unpool(1),
        ),
    ),
    Row(
        "pooling, 2d",
        lambda a: Beside(
            (2, 4, 6),
            nn.MaxPool2d(3, 2, 1),
            nn.AvgPool2d((2, 3), count_include_pad=False, padding=1),
            nn.LPPool2d(4, 2),
            nn.AdaptiveMaxPool2d((2, 3)),
            nn.AdaptiveAvgPool2d((None, 4)),
            Unpool(2),
            nn.FractionalMaxPool2d(2, output_size=(2, 3)),
        ),
    ),
    Row(
        "pooling, 3d",
        lambda a: Beside(
            (1, 4, 4, 4),
            nn.MaxPool3d(2, 2),
            nn.AvgPool3d(2, divisor_override=3),
            nn.LPPool3d(2, 2),
            nn.AdaptiveMaxPool3d(2),
            nn.AdaptiveAvgPool3d((1, 2, 3)),
            Unpool(3),
            nn.FractionalMaxPool3d(2, output_ratio=0.5),
        ),
        slow=True,
    ),
)

# ---- activations ----

rows(
    Row(
        "activations",
        lambda a: Beside(
            (6,),
            *(getattr(nn, name)() for name in ("ReLU", "ReLU6", "SELU", "GELU", "SiLU", "Mish", "Sigmoid", "Tanh")),
            *(getattr(nn, name)() for name in ("LogSigmoid", "Softsign", "Tanhshrink", "Hardsigmoid", "Hardswish")),
            *(getattr(nn, name)() for name in ("ELU", "CELU", "LeakyReLU", "Softplus", "Hardshrink", "Softshrink")),
            *(nn.GELU("tanh"), nn.Hardtanh(), nn.Threshold(0.1, 20.0), nn.GLU(), nn.PReLU(), nn.PReLU(6, 0.1)),
            *(nn.Softmax(1), nn.LogSoftmax(1), nn.Softmin(1), nn.Identity()),
            nn.Sequential(nn.Unflatten(1, (2, 1, 3)), nn.Softmax2d()),
            nn.Sequential(nn.SiLU(), nn.ReLU(inplace=True)),
        ),
    ),
    Row(
        "activations whose constants ride",
        lambda a: Beside(
            (6,),
            *(nn.LeakyReLU(a), nn.ELU(a), nn.Softplus(a), nn.Softplus(2.0, a), nn.Hardshrink(a)),
            *(nn.Softshrink(a), nn.Threshold(a, -a), nn.Hardtanh(-a, 2 * a)),
            nn.Sequential(nn.SiLU(), nn.LeakyReLU(a, inplace=True)),
            *(nn.RReLU(), nn.RReLU(a / 2, a), nn.Sequential(nn.SiLU(), nn.RReLU(a, 0.5, inplace=True))),
        ),
        slow=True,
    ),
    Row(
        "CELU",
        lambda a: Beside((6,), nn.CELU(a), nn.Sequential(nn.SiLU(), nn.CELU(a, inplace=True))),
        # torch 2.13.0 rounds 1 / alpha to float32 in the gradient of CELU
        tolerance=1e-7,
    ),
)

# ---- shapes ----

rows(
    Row(
        "padding, shuffles, upsampling",
        lambda a: Beside(
            (4, 2, 4),
            *(nn.ZeroPad2d(1), nn.ConstantPad2d((1, 0, 2, 0), a), nn.ReflectionPad2d(1), nn.ReplicationPad2d(2)),
            *(nn.CircularPad2d((1, 1, 0, 1)), nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ChannelShuffle(2)),
            *(nn.Upsample(scale_factor=2), nn.Upsample((3, 5), mode="bilinear"), nn.UpsamplingBilinear2d((4, 4))),
            *(nn.Upsample(scale_factor=1.5, mode="bicubic"), nn.Unfold(2), nn.Flatten(1, 2)),
            nn.Sequential(
                nn.Flatten(2), nn.ReflectionPad1d(2), nn.ConstantPad1d(1, 0.5), nn.Upsample(9, mode="linear")
            ),
            nn.Sequential(nn.Flatten(2), nn.Unflatten(1, (2, 2)), nn.Flatten(1, 2), nn.Unflatten(1, (4, 1))),
            nn.Sequential(nn.Unfold(2), nn.Fold((2, 4), 2)),
            nn.Sequential(
                nn.Unflatten(1, (2, 2)), nn.ReplicationPad3d(1), nn.Upsample(scale_factor=2, mode="trilinear")
            ),
        ),
        slow=True,
    ),
)
