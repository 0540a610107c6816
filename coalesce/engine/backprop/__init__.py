"""One model, its gradients never alive at once."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from coalesce.engine.backprop.model import Halting, Model, halting
from coalesce.engine.backprop.optimizer import BackPropOptimizer, check_accumulate
from coalesce.engine.backprop.walk import Walk
from coalesce.engine.backprop.words import warn

#: They average gradients over processes after each one is complete, and so after the update.
_PARALLEL = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}

_ALIVE: weakref.WeakSet[Walk] = weakref.WeakSet()


def BackProp(
    model: Model,
    optimizer: Optimizer,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> tuple[Model, BackPropOptimizer]:
    """Train one model with less memory: each gradient is used and freed as soon as it exists.

    The training loop stays as it is. ``loss.backward()`` computes the gradient of the model's output and halts there;
    ``optimizer.step()`` walks back through the model and updates each parameter as soon as its gradient is complete. So
    a step needs its activations and about one layer's gradient, and the weights are those of the plain loop, bit for
    bit.

    >>> import coalesce, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    >>> model, optimizer = coalesce.BackProp(model, optimizer)
    >>> x, y = torch.ones(5, 4), torch.zeros(5, 1)
    >>> for _ in range(100):
    ...     loss = torch.nn.functional.mse_loss(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()
    >>> loss.item() < 1e-3
    True

    What stays as it was: learning-rate schedules, `state_dict` of both (they load into the plain model and optimiser
    and back), parameter groups, tied, frozen, thawed and unused parameters, `add_param_group`, hooks, autocast with
    bfloat16, averages of the weights (a deep copy of the model is a plain one, `AveragedModel`'s too). The model and
    optimiser that are returned share everything with those given, and these are plain again when the returned ones are
    gone.

    What differs:

    - The model returns one tensor where gradients are on, and a loss belongs to one call of it and reads no parameter
      by itself.
    - Gradients cannot be read between ``backward()`` and ``step()``: ``clip_grad_norm_``, ``clip_grad_value_`` and the
      like raise, and the options below take their place. Weights, buffers and inputs must not be changed there either.
    - ``backward()`` comes to one forward pass per step; a second one displaces the first with a warning.
    - Parameters of the model that the optimiser does not have get no gradient and stay as they are. Tensors of the
      optimiser that are not the model's (a loss's own weights) get their gradients in ``backward()`` itself, and are
      updated in ``step()`` as well.
    - A model that `torch.compile` compiled in one piece computes all its gradients in one piece. Compile its blocks
      instead (``for block in model.blocks: block.compile()``).

    Args:
        model: any `nn.Module`.
        optimizer: an optimiser over its parameters that treats each of them by itself, as all of `torch.optim` but
            LBFGS do. ``foreach`` and ``fused`` are switched off with a warning.
        accumulate: ``backward()`` calls per ``step()``, whose gradients are summed as in a plain loop; above 1 every
            gradient is alive at once. For a shorter last group set ``optimizer.accumulate``.
        clip_norm: clip the gradients' global norm to it, as `torch.nn.utils.clip_grad_norm_` does; every gradient is
            then alive at once. ``optimizer.gradient_norm`` is the norm before. ``math.inf`` only measures it.
        clip_value: clip every entry of a gradient to [-clip_value, clip_value], as `torch.nn.utils.clip_grad_value_`
            does; before the norm, where both are given.

    Returns:
        the model to call and the optimiser to step, of the given model's class and a `torch.optim.Optimizer`.

    Raises:
        TypeError: if an argument is of the wrong kind, or of one that cannot be trained in this way.
        ValueError: if the two do not belong together, or an option is out of range.
    """
    _check_model(model)
    _check_optimizer(optimizer)
    _check_parameters(model, optimizer)
    for name, bound in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if bound is not None and not (isinstance(bound, (int, float)) and bound > 0 and not isinstance(bound, bool)):
            raise ValueError(f"{name}={bound!r}: must be a positive number, or None for no clipping")
    walk = Walk(model, optimizer, check_accumulate(accumulate), clip_norm, clip_value)
    stepped = BackPropOptimizer(walk)
    _ALIVE.add(walk)
    return halting(model, walk), stepped


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    if isinstance(model, Halting):
        raise TypeError("this model came out of coalesce.BackProp; give it the plain model and optimizer")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a ScriptModule cannot be given to coalesce.BackProp; give it the plain nn.Module")
    for name, module in model.named_modules():
        found = {kind.__name__ for kind in type(module).__mro__} & _PARALLEL
        if found:
            raise TypeError(
                f"{name or 'the model'} is a {found.pop()}: it averages gradients over processes when they are "
                "complete, which is when coalesce.BackProp has used them; train it with the plain optimizer"
            )


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, BackPropOptimizer):
        raise TypeError("this optimizer came out of coalesce.BackProp; give it the plain model and optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{type(optimizer).__name__} computes the loss several times within a step, for which it needs a closure "
            "and every gradient at once; coalesce.BackProp takes optimizers that treat each parameter by itself, such "
            "as AdamW or SGD"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            "differentiable=True: under coalesce.BackProp no graph outlives its step; leave it out, or use the plain "
            "optimizer"
        )


def _check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    named = {parameter: name for name, parameter in model.named_parameters()}
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not given & named.keys():
        raise ValueError(
            "none of the optimizer's parameters is a parameter of the model: it was made for another instance; make it "
            "from model.parameters()"
        )
    if any(given & walk.groups.keys() or named.keys() & walk.inside.keys() for walk in _ALIVE):
        raise ValueError(
            "parameters of this model are under another coalesce.BackProp; go on with what that one returned, or "
            "delete it first"
        )
    if any(parameter.grad is not None for parameter in given):
        raise ValueError("there are gradients from an earlier backward(); call optimizer.zero_grad() first")
    left_out = [name for parameter, name in named.items() if parameter.requires_grad and parameter not in given]
    if left_out:
        warn(
            f"the optimizer lacks these parameters of the model: {_some(left_out)}. They get no gradient and stay as "
            "they are, also under a second optimizer; freeze them (requires_grad_(False)) or give them to this one, in "
            "a group of their own"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
