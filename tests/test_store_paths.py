"""File names of a run folder.

Oracle: the file system itself, and names as a hostile user would choose them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coalesce.store.paths import NAME_BYTES, RunPaths, check_root, safe_name

NOW = datetime(2026, 11, 29, 16, 3, 37)

HOSTILE = [
    ("lr_grid", "lr_grid"),
    ("a/b", "a_b"),
    ("../../etc/passwd", "etc_passwd"),
    ("..", "sweep"),
    (".", "sweep"),
    ("", "sweep"),
    ("   ", "sweep"),
    ("-rf", "rf"),
    (".hidden", "hidden"),
    ('it\'s "quoted"', "it_s_quoted"),
    ("two words\nand a line", "two_words_and_a_line"),
    ("a=1,b=[2]", "a_1_b_2"),
    ("null\0byte", "null_byte"),
    ("C:\\windows", "C_windows"),
    ("größe", "größe"),
    ("\ud800", "sweep"),
]


@pytest.mark.parametrize(("name", "folder"), HOSTILE)
def test_hostile_names(tmp_path: Path, name: str, folder: str) -> None:
    made = RunPaths.create(tmp_path, name, NOW).folder
    assert made == tmp_path / folder / "2026-11-29_16-03-37"
    assert made.is_dir()


@given(st.text())
def test_any_name_is_one_folder(name: str) -> None:
    safe = safe_name(name)
    assert safe == Path(safe).name
    assert safe not in ("", ".", "..")
    assert safe[0] not in ".-"
    assert len(safe.encode()) <= NAME_BYTES
    assert safe_name(safe) == safe


def test_a_long_name_makes_a_folder(tmp_path: Path) -> None:
    assert RunPaths.create(tmp_path, "ü" * 5000, NOW).folder.is_dir()


def test_the_same_second_gives_folders_of_their_own(tmp_path: Path) -> None:
    names = [RunPaths.create(tmp_path, "lr_grid", NOW).folder.name for _ in range(3)]
    assert names == ["2026-11-29_16-03-37", "2026-11-29_16-03-37_2", "2026-11-29_16-03-37_3"]


def test_the_same_second_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: RunPaths.create(tmp_path, "lr_grid", NOW).folder, range(32)))
    assert len(set(folders)) == 32


def test_parts_are_in_order_and_of_all_jobs(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    written = [paths.metric_part(100_000), paths.metric_part(9), paths.metric_part(10)]
    written += [RunPaths(tmp_path, job).metric_part(0) for job in (10, 1, 0)]
    written[0].parent.mkdir()
    for part in [*written, written[0].parent / ".part-00011.parquet.1234.tmp", written[0].parent / "notes.txt"]:
        part.touch()
    assert [part.name for part in paths.metric_parts()] == [
        "part-00009.parquet",
        "part-00010.parquet",
        "part-100000.parquet",
        "job-0-part-00000.parquet",
        "job-1-part-00000.parquet",
        "job-10-part-00000.parquet",
    ]
    assert paths.result_parts() == []


def test_every_name_lies_in_the_folder(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    names = [paths.configuration, paths.environment, paths.plan, paths.results, paths.results_csv, paths.history]
    names += [paths.log, RunPaths(tmp_path, 3).log, paths.weights("0a1b"), paths.metric_part(0), paths.result_part(0)]
    assert len(set(names)) == len(names)
    assert all(name.is_relative_to(tmp_path) for name in names)


@pytest.mark.parametrize("name", ["../x", "a/b", "", "a b", "."])
def test_weights_of_no_id(name: str) -> None:
    with pytest.raises(ValueError, match="no experiment id"):
        RunPaths("run").weights(name)


def test_a_root_that_can_be_made_is_no_problem_and_is_not_made(tmp_path: Path) -> None:
    assert check_root(tmp_path / "not" / "there", "runs") == []
    assert check_root("relative", "runs") == []
    assert list(tmp_path.iterdir()) == []


def test_a_root_inside_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (problem,) = check_root(tmp_path / "file" / "runs", "runs")
    assert problem.key == "runs"
    assert f"{str(tmp_path / 'file')!r} is a file" in str(problem)


def test_a_root_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # asked of the system rather than made with chmod: the superuser may write everywhere
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (problem,) = check_root(tmp_path / "runs", "runs")
    assert "cannot be written" in str(problem)
    assert str(check_root("", "runs")[0]).startswith("runs='': must name a folder")
