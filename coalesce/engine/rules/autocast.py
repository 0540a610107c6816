"""Mixed precision inside a lane: torch.autocast's lists, applied to torch's functions by name.

torch applies them below vmap, to what vmap has taken the functions apart into, and so to other dtypes than in a plain
loop: a Linear with bias and the normalisations come out in float32, cross-entropy in bfloat16. Here they are applied
before, by the mode that a lane's code runs under, and torch's own are off meanwhile.

The lists are those of torch 2.13.0 for the CPU (`aten/src/ATen/autocast_mode.h`), and hold on every device, so that a
precision means the same everywhere. `tests/test_autocast.py` holds each to stock `torch.autocast`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def _named(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: In bfloat16: products.
_LOW = _named(
    "linear matmul __matmul__ __rmatmul__ mm bmm addmm addbmm baddbmm einsum tensordot inner chain_matmul "
    "linalg_multi_dot linalg_vecdot multi_dot vecdot conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d "
    "conv_transpose3d prelu scaled_dot_product_attention lstm rnn_tanh rnn_relu rnn_tanh_cell rnn_relu_cell"
)
#: In float32: losses, distances, decompositions.
_HIGH = _named(
    "avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits grid_sample grid_sampler polar prod quantile "
    "nanquantile stft cdist trace view_as_complex cholesky cholesky_inverse cholesky_solve inverse lu_solve ormqr "
    "pinverse max_pool3d max_unpool2d max_unpool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d "
    "replication_pad1d replication_pad2d replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d "
    "nll_loss_nd hinge_embedding_loss poisson_nll_loss smooth_l1_loss cross_entropy cross_entropy_loss l1_loss "
    "huber_loss margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss kl_div "
    "multilabel_margin_loss linalg_inv inv linalg_inv_ex linalg_cholesky linalg_det det linalg_slogdet slogdet "
    "linalg_solve solve linalg_svd svd svdvals linalg_eigh eigh eigvalsh linalg_qr qr matrix_rank pinv lstsq "
    "matrix_norm cond tensorinv tensorsolve householder_product fft ifft fft2 ifft2 fftn ifftn rfft irfft rfft2 "
    "irfft2 rfftn irfftn hfft ihfft"
)
#: Computed in float32, their result in the dtype of the input, as the fused kernels of a plain loop do.
_SAME = _named("layer_norm rms_norm group_norm batch_norm instance_norm")
#: Recurrences whose products alone are in bfloat16: computed in float32 here, their result in the dtype of the state.
_STATE = _named("gru gru_cell lstm_cell")
#: What autocast leaves alone: integers, float64.
_CAST = (torch.float32, torch.bfloat16, torch.float16)


def precision_of(device: torch.device) -> torch.dtype | None:
    """What `torch.autocast` is set to, or None."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def cast(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], precision: torch.dtype
) -> tuple[tuple[Any, ...], Mapping[str, Any], torch.dtype | None]:
    """Arguments as a function is to get them.

    Returns:
        The arguments, and the dtype that the function's result is to have, if that is to be changed.
    """
    name = getattr(function, "__name__", "")
    if name in _LOW:
        # a number that rides is no product's factor, and 0.1 is not to be rounded to 8 bits
        args, kwargs = tree_map(lambda t: _to(t, precision) if _dims(t) else t, (args, dict(kwargs)))
    elif name in _HIGH:
        args, kwargs = tree_map(lambda t: _to(t, torch.float32), (args, dict(kwargs)))
    elif name in _SAME:
        x = args[0] if args else kwargs["input"]
        if isinstance(x, Tensor) and x.dtype in _CAST and x.dtype != torch.float32:
            if args:
                return (x.float(), *args[1:]), kwargs, x.dtype
            return args, {**kwargs, "input": x.float()}, x.dtype
    elif name in _STATE:
        state = args[1][0] if isinstance(args[1], tuple | list) else args[1]
        wide, options = tree_map(lambda t: _to(t, torch.float32), (args, dict(kwargs)))
        return wide, options, state.dtype if state.dtype in _CAST else None
    return args, kwargs, None


def _dims(t: Any) -> int:
    return t.dim() if isinstance(t, Tensor) else 0


def _to(t: Any, dtype: torch.dtype) -> Any:
    return t.to(dtype) if isinstance(t, Tensor) and t.dtype in _CAST else t
