"""The guide's own examples of folds, of metrics that are no averages and of a search run as they are written.

Oracle: scikit-learn's logistic regression separates this data with an area of 0.99 under the curve; a network that has
learnt anything comes near.
"""

from __future__ import annotations

import functools
import re
import runpy
from pathlib import Path

import pytest

import coalesce

GUIDE = Path(coalesce.__file__).parent.parent / "docs" / "guide.md"


@pytest.mark.slow
def test_folds_and_summaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for name in ("cancer", "judged"):
        found = re.search(rf"`{name}\.py`[^\n]*\n\n```python\n(.*?)```", text, re.DOTALL)
        assert found is not None, name
        (tmp_path / f"{name}.py").write_text(found[1], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    # the numbers are the same, and nothing takes a minute
    monkeypatch.setattr(coalesce, "sweep", functools.partial(coalesce.sweep, compile=False))
    printed = []
    for name in ("cancer", "judged"):
        runpy.run_path(str(tmp_path / f"{name}.py"), run_name="__main__")
        printed.append(capsys.readouterr().out)
    folds, judged = (re.findall(r"^\d\S*\s+(\S+)\s+(\S+)(?:\s+(\S+))?$", out, re.MULTILINE) for out in printed)
    assert [count for _, _, count in folds] == ["5", "5"]
    assert all(float(mean) > 0.85 for mean, _, _ in folds)
    assert len(judged) == 2
    assert all(float(auc) > 0.97 and float(f1) > 0.9 for auc, f1, _ in judged)


@pytest.mark.thorough
def test_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"`search\.py`[^\n]*\n\n```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    (tmp_path / "search.py").write_text(found[1], encoding="utf-8")
    monkeypatch.setattr(coalesce, "sweep", functools.partial(coalesce.sweep, compile=False, check=False))
    frame = runpy.run_path(str(tmp_path / "search.py"), run_name="__main__")["frame"]
    assert "best/val/accuracy" in capsys.readouterr().out
    # eight settings with two seeds each, most of which end early
    assert list(frame["seed"]) == [0, 1] * 8
    assert frame["optimizer.lr"].nunique() == 8
    assert set(frame["status"]) == {"finished", "stopped"}
    assert set(frame["steps"]) == {50, 100, 200}
    assert frame["best/val/accuracy"].max() > 0.9
