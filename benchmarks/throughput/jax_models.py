"""The three models as functions of trees of arrays, as they are written in JAX.

Weights come from PyTorch under its names; `layout` turns them into what is usual here: kernels of linear layers (I, O),
of convolutions (height, width, I, O), images with their channels last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Mapping[str, Any]
Loss = Callable[[Tree, Tree, tuple[Any, ...]], tuple[jax.Array, dict[str, Any]]]

#: Entries of a state_dict that are not trained.
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def layout(name: str, array: np.ndarray) -> np.ndarray:
    """Weights of all lanes (K, ...) in JAX's layout."""
    if array.ndim == 5:
        return np.ascontiguousarray(array.transpose(0, 3, 4, 2, 1))
    if array.ndim == 3 and not name.startswith(("tokens.", "positions.")):
        return np.ascontiguousarray(array.transpose(0, 2, 1))
    return array


def _linear(params: Tree, name: str, x: jax.Array) -> jax.Array:
    y = x @ params[f"{name}.weight"]
    return y + params[f"{name}.bias"] if f"{name}.bias" in params else y


def _cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def mlp(params: Tree, buffers: Tree, batch: tuple[Any, ...]) -> tuple[jax.Array, dict[str, Any]]:
    """`coalesce.tasks.Mnist1dMLP` and `Digits`, of two hidden layers, without dropout."""
    x, y = batch
    x = jax.nn.relu(_linear(params, "0.0", x))
    x = jax.nn.relu(_linear(params, "1.0", x))
    return _cross_entropy(_linear(params, "2", x), y), dict(buffers)


def _convolution(params: Tree, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
    kernel = params[f"{name}.weight"]
    pad = kernel.shape[0] // 2
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=numbers)


def _batch_norm(params: Tree, buffers: dict[str, Any], name: str, x: jax.Array) -> jax.Array:
    """Normalise by the batch, and move the running statistics; as torch does it."""
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    count = x.size / x.shape[-1]
    for kind, value in (("running_mean", mean), ("running_var", var * count / (count - 1))):
        buffers[f"{name}.{kind}"] = 0.9 * buffers[f"{name}.{kind}"] + 0.1 * value
    buffers[f"{name}.num_batches_tracked"] = buffers[f"{name}.num_batches_tracked"] + 1
    scale = params[f"{name}.weight"] * jax.lax.rsqrt(var + 1e-5)
    return (x - mean) * scale + params[f"{name}.bias"]


def cnn(params: Tree, buffers: Tree, batch: tuple[Any, ...]) -> tuple[jax.Array, dict[str, Any]]:
    """`coalesce.tasks.ResNet` with one block in each stage, without dropout."""
    x, y = batch
    state = dict(buffers)
    x = jax.nn.relu(_batch_norm(params, state, "stem.1", _convolution(params, "stem.0", x)))
    for stage in range(3):
        name, stride = f"stages.{stage}", 1 if stage == 0 else 2
        h = _convolution(params, f"{name}.conv1", x, stride)
        h = jax.nn.relu(_batch_norm(params, state, f"{name}.norm1", h))
        h = _batch_norm(params, state, f"{name}.norm2", _convolution(params, f"{name}.conv2", h))
        if stage:
            x = _convolution(params, f"{name}.shortcut.0", x, stride)
            x = _batch_norm(params, state, f"{name}.shortcut.1", x)
        x = jax.nn.relu(h + x)
    return _cross_entropy(_linear(params, "linear", x.mean((1, 2))), y), state


def _layer_norm(params: Tree, name: str, x: jax.Array) -> jax.Array:
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * params[f"{name}.weight"] + params[f"{name}.bias"]


def gpt(params: Tree, buffers: Tree, batch: tuple[Any, ...]) -> tuple[jax.Array, dict[str, Any]]:
    """`coalesce.tasks.CharLM` with 4 heads, without dropout."""
    (windows,) = batch
    tokens, y = windows[:, :-1].astype(jnp.int32), windows[:, 1:].astype(jnp.int32)
    x = params["tokens.weight"][tokens] + params["positions.weight"][: tokens.shape[1]]
    layers = len({name.split(".")[1] for name in params if name.startswith("blocks.")})
    for i in range(layers):
        name = f"blocks.{i}"
        qkv = _linear(params, f"{name}.attention.qkv", _layer_norm(params, f"{name}.norm1", x))
        q, k, v = (z.reshape(*z.shape[:-1], 4, -1) for z in jnp.split(qkv, 3, -1))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + _linear(params, f"{name}.attention.out", attended.reshape(x.shape))
        h = _linear(params, f"{name}.mlp.hidden", _layer_norm(params, f"{name}.norm2", x))
        x = x + _linear(params, f"{name}.mlp.out", jax.nn.gelu(h, approximate=False))
    return _cross_entropy(_linear(params, "head", _layer_norm(params, "norm", x)), y), dict(buffers)


MODELS: dict[str, Loss] = {"mlp": mlp, "digits": mlp, "cnn": cnn, "gpt": gpt}
