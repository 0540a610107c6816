"""torch's functions inside a lane: a float that rides must count, which `test_rules_riding.py` sees to, or be refused
by name; nothing may be drawn from a generator that lanes share.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from coalesce.engine.rules import Rules
from coalesce.errors import TaskError
from rules_helpers import KEYS, STEP, Function, hidden, in_lanes

# of functions that have no rule for lanes of their own: they are slow, and right
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

REFUSED: dict[str, Function] = {
    "cdist": lambda h, a: torch.cdist(h, h, a),
    "renorm": lambda h, a: torch.renorm(h, 2, 0, a),
    "arange": lambda h, a: h * torch.arange(0, a, 0.1).sum(),
    "histc": lambda h, a: torch.histc(h, 3, max=a),
    "__float__": lambda h, a: h * float(a),
    "__bool__": lambda h, a: h if a else -h,
    "__format__": lambda h, a: h * len(f"{a:.2f}"),
    "item": lambda h, a: h * a.item(),
}

#: They ask for a value that follows from a float: the operation is named, and every float that rides.
ASKS: dict[str, Function] = {
    "__bool__": lambda h, a: h if a > 0.5 else -h,
    "item": lambda h, a: h * (a * 2).item(),
    "cdist": lambda h, a: torch.cdist(h, h, 1 + a),
    "tolist": lambda h, a: h * (h * a).tolist()[0][0],
}

DRAWS: dict[str, Function] = {
    "poisson": lambda h, a: h + torch.poisson(h.abs()),
    "binomial": lambda h, a: h + torch.binomial(torch.full_like(h, 5.0), h.abs()),
    "_standard_gamma": lambda h, a: h + torch.distributions.Gamma(1.0, 1.0).sample(),
    "kaiming_uniform_": lambda h, a: h + torch.nn.init.kaiming_uniform_(h.clone()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_float_is_refused_by_name(name: str) -> None:
    with pytest.raises(TaskError) as caught:
        in_lanes(REFUSED[name])
    text = str(caught.value)
    assert f"{name}() takes only a Python number where task.a stands" in text
    assert 'static = ("a",)' in text
    assert f'File "{__file__}"' in text


@pytest.mark.parametrize("name", ASKS)
def test_a_value_is_not_there(name: str) -> None:
    with pytest.raises(TaskError) as caught:
        in_lanes(ASKS[name])
    text = str(caught.value)
    assert f"{name}() asks for the value of a tensor" in text
    assert "Floats that ride here: task.a, task.b" in text
    assert f'File "{__file__}"' in text


@pytest.mark.parametrize("name", DRAWS)
def test_nothing_is_drawn_from_the_global_generator(name: str) -> None:
    with pytest.raises(TaskError, match=rf"{name}\(\) draws from torch's global generator"):
        in_lanes(DRAWS[name])
    # in a plain call it would work, and so is watched where it is tried before tracing
    with (
        pytest.raises(TaskError, match=rf"{name}\(\) draws from torch's global generator"),
        Rules(KEYS[0], STEP, {}, watch=True),
    ):
        DRAWS[name](hidden(), 0.1)


SHAPES: dict[str, Function] = {
    "__getitem__": lambda h, a: h[h > a].mean(),
    "nonzero": lambda h, a: (h > a).nonzero().double().mean(),
    "unique": lambda h, a: h.unique().mean(),
    "one_hot": lambda h, a: h * F.one_hot(h.argmax(-1)),
    "masked_select": lambda h, a: h.masked_select(h > a).mean(),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_depends_on_values(name: str) -> None:
    with pytest.raises(TaskError, match=r"gives a result whose shape depends on the values") as caught:
        in_lanes(SHAPES[name])
    assert f'File "{__file__}"' in str(caught.value)


def test_every_call_and_every_step_and_every_key_draws_anew() -> None:
    x = torch.ones(64)
    masks = []
    for key in KEYS[:2]:
        for step in (0, 1):
            with Rules(key, torch.tensor(step), {}):
                masks += [F.dropout(x, 0.5), F.dropout(x, 0.5)]
    for i, mask in enumerate(masks):
        assert 16 < int((mask == 2).sum()) < 48
        assert set(mask.tolist()) == {0.0, 2.0}
        assert not any(torch.equal(mask, other) for other in masks[i + 1 :])
