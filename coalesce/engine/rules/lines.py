"""Which line of the user's own code is to blame."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from pathlib import Path

import torch
from torch import nn


def user_line(error: BaseException | None = None) -> str:
    """The innermost line of a stack that is neither torch's, Python's nor ours, as a traceback shows it.

    Args:
        error: whose traceback to look at; without one, the stack that stands.
    """
    frames = traceback.extract_tb(error.__traceback__) if error is not None else traceback.extract_stack()
    kinds = [_kind(frame.filename) for frame in frames]
    known = list(zip(frames, kinds, strict=True))
    # what called us is no part of the task
    inside = known[kinds.index("ours") :] if "ours" in kinds else known
    # a task may be installed beside other packages: their lines count if there is none outside
    places = [(inside, "user"), (inside, "package"), (known, "user")]
    theirs = next((found for part, kind in places if (found := [f for f, k in part if k == kind])), [])
    if not theirs:
        return "  (at no line of the task's own)"
    chosen = theirs[-1]
    source = linecache.getline(chosen.filename, chosen.lineno or 0).strip()
    return f'{_module(error)}  File "{chosen.filename}", line {chosen.lineno}, in {chosen.name}\n    {source}'


def _module(error: BaseException | None) -> str:
    """The innermost module whose code a stack is in, by its path in the outermost; empty if it is that itself."""
    if error is not None:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    else:
        frames = [frame for frame, _ in traceback.walk_stack(None)][::-1]
    entered = [
        m for f in frames if f.f_code.co_name == "_call_impl" and isinstance(m := f.f_locals.get("self"), nn.Module)
    ]
    if not entered or entered[-1] is entered[0]:
        return ""
    inner = entered[-1]
    path = next((name for name, module in entered[0].named_modules() if module is inner), "")
    return f"  In the model's {path + ', ' if path else ''}{type(inner).__name__}:\n"


_OURS = Path(__file__).parents[2]
_HOMES = {
    "torch": Path(torch.__file__).parent,
    "package": Path(sysconfig.get_path("purelib")),
    "python": Path(sysconfig.get_path("stdlib")),
}


def _kind(filename: str) -> str:
    path = Path(filename)
    if path.is_relative_to(_OURS):
        # the tasks that ship are read as a user's own would be
        return "user" if path.is_relative_to(_OURS / "tasks") else "ours"
    if filename.startswith("<"):
        return "python"
    return next((kind for kind, home in _HOMES.items() if path.is_relative_to(home)), "user")
