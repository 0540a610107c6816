"""Imports go downwards only.

Oracle: the order of layers as `docs/design.md` writes it, read from that file, and the syntax trees of the package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import coalesce

PACKAGE = Path(coalesce.__file__).parent
DESIGN = PACKAGE.parent / "docs" / "design.md"

#: Parts that the page's order leaves out, and the part that each stands beside.
BESIDE = {
    "kernels": "errors",
    "data": "task",
    "tasks": "engine",
    "library": "configuration",
    "loading": "configuration",
}

#: The runner's interfaces: what the store and the displays implement. They stand below it, beside the experiment.
INTERFACES = {"runner.listener": "experiment", "runner.plan": "experiment", "runner.snapshot": "experiment"}

#: What must run where only torch is installed.
LIGHT = ("errors", "kernels", "data", "task", "experiment", "random", "optim", "engine")
HEAVY = {"hydra", "omegaconf", "pandas", "pyarrow", "sklearn", "rich", "scipy", "matplotlib"}

MODULES = sorted(PACKAGE.rglob("*.py"))


def layers() -> dict[str, int]:
    """Part → its height, from the line of the design page that has the arrows. 0 is the lowest."""
    text = DESIGN.read_text()
    order = re.search(r"^ +(__main__.*(?:\n +.*)*→ errors)$", text, re.MULTILINE)
    assert order is not None, "docs/design.md lost its line of layers"
    names = [[name.strip() for name in layer.split(",")] for layer in order[1].split("→")]
    heights = {name: height for height, layer in enumerate(reversed(names)) for name in layer}
    return heights | {name: heights[like] for name, like in (BESIDE | INTERFACES).items()}


def part(module: str) -> str:
    """coalesce.optim.base → optim; the package's own `__init__` → an empty string."""
    return module.split(".")[1] if "." in module else ""


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports, wherever it stands in it.

    Args:
        source: the module's text.
        package: the package that it stands in, for relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            # `from coalesce import engine` imports a part as well
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)


def height(name: str) -> int | None:
    """The height of a dotted name of the package; None for the package's own names."""
    inside = name.split(".")[1:]
    found = layers()
    return found.get(".".join(inside[:2]), found.get(part(name)))


def upward(source: str, module: str, package: str) -> list[str]:
    """What a module imports from above itself."""
    own = height(module)
    assert own is not None, f"{module} has no place in docs/design.md's order of layers"
    wrong = []
    for line, name in imports(source, package):
        if name.split(".")[0] != "coalesce":
            continue
        target = height(name)
        # public names by `import coalesce`: for the ready tasks alone, which users copy
        public = part(module) == "tasks" and part(name) in ("", *coalesce.__all__)
        if not (public if target is None else target <= own):
            wrong.append(f"{module}:{line} imports {name}")
    return wrong


def dotted(path: Path) -> tuple[str, str]:
    """A file's module and the package that it stands in."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__"), ".".join(parts[:-1])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path) -> None:
    module, package = dotted(path)
    if part(module):  # coalesce/__init__.py hands out names of every layer
        assert upward(path.read_text(), module, package) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_engine_and_below_know_nothing_heavy(path: Path) -> None:
    module, package = dotted(path)
    if part(module) in LIGHT:
        found = list(imports(path.read_text(), package))
        assert [(line, name) for line, name in found if name.split(".")[0] in HEAVY] == []
        # nor through a neighbour: the store knows files and pandas
        ours = [(line, name) for line, name in found if name.split(".")[0] == "coalesce"]
        assert [(line, name) for line, name in ours if part(name) not in LIGHT] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("coalesce.errors", "import coalesce.task"),
        ("coalesce.task", "from coalesce.engine.walk import Walk"),
        ("coalesce.optim.adam", "def late():\n    from coalesce import engine"),
        ("coalesce.engine.walk", "from ..runner import loop"),
        ("coalesce.engine.walk", "from coalesce import Task"),
        ("coalesce.store.paths", "from coalesce.runner.loop import run"),
        ("coalesce.runner.plan", "from coalesce.runner.loop import run"),
        ("coalesce.runner.run", "import coalesce.launch.local as launch"),
        ("coalesce.tasks.digits", "import coalesce.runner"),
    ],
)
def test_an_upward_import_is_seen(module: str, source: str) -> None:
    assert len(upward(source, module, module.rpartition(".")[0])) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("coalesce.task", "from coalesce.errors import TaskError\nfrom coalesce.data import Data"),
        ("coalesce.engine.walk", "from .lanes import Lanes\nfrom ..optim import base\nimport torch"),
        ("coalesce.store.writer", "from coalesce.runner.listener import Listener"),
        ("coalesce.tasks.digits", "import coalesce"),
    ],
)
def test_a_downward_import_is_not(module: str, source: str) -> None:
    assert upward(source, module, module.rpartition(".")[0]) == []
