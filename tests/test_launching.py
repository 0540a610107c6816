"""A launcher's settings: the files, what is passed on to sbatch, and what is refused.

Oracle: the defaults of `LauncherSettings`, the examples of sbatch(1) for ``--time``, and the messages' own words.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from cli_for_tests import CommandLine
from coalesce.__main__ import conf_folder
from coalesce.configuration.launching import KEYS, REFUSED, check_launcher
from coalesce.configuration.slurm_time import minutes
from coalesce.errors import ConfigError
from coalesce.launch.settings import LAUNCHERS, LauncherSettings

pytest.importorskip("submitit", reason="the launchers that start jobs need submitit")

#: Options of sbatch 22.05 that coalesce leaves to whoever needs them (from sbatch(1)).
WORDS = (
    "acctg-freq batch bb bbf begin chdir cluster-constraint comment container contiguous core-spec "
    "cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot dependency distribution exclude exclusive export "
    "export-file extra-node-info get-user-env gid gpu-bind gpu-freq gres-flags hint hold ignore-pbs input "
    "kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus "
    "network nice no-kill nodefile nodelist ntasks-per-core ntasks-per-gpu ntasks-per-socket overcommit "
    "oversubscribe power prefer priority profile propagate reboot reservation sockets-per-node spread-job "
    "switches thread-spec threads-per-core time-min tmp tres-bind tres-per-task uid use-min-nodes verbose "
    "wait-all-nodes "
)
SBATCH = WORDS.split()
#: Those of the plugin pyxis, which clusters with containers have.
PYXIS = [
    f"container-{name}" for name in ("image", "mounts", "workdir", "name", "save", "env", "entrypoint", "writable")
]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path, monkeypatch, capsys)


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_launcher(settings)
    assert len(caught.value.problems) == 1, caught.value
    return str(caught.value)


def slurm(**settings: Any) -> LauncherSettings:
    return check_launcher({"name": "slurm", **settings})


# what is shipped


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_launcher_has_a_file_with_its_defaults(name: str) -> None:
    found = OmegaConf.to_container(OmegaConf.load(conf_folder() / "launcher" / f"{name}.yaml"))
    assert isinstance(found, dict)
    assert list(found) == ["name", *KEYS[name]]
    assert check_launcher({str(k): v for k, v in found.items()}) == check_launcher({"name": name})
    assert check_launcher({"name": name}) == LauncherSettings(name=name)


def test_every_setting_is_a_key_of_slurm() -> None:
    assert {f.name for f in dataclasses.fields(LauncherSettings)} == {"name", "sbatch", *KEYS["slurm"]}


def test_nothing_is_this_process() -> None:
    assert check_launcher(None) == check_launcher({}) == LauncherSettings()


def test_a_launcher_on_the_command_line(cli: CommandLine) -> None:
    assert cli.order().launcher == LauncherSettings("process")
    assert cli.order("launcher=local", "launcher.jobs=2").launcher == LauncherSettings("local", jobs=2)
    found = cli.order(
        "launcher=slurm", "launcher.jobs=8", "launcher.partition=gpu", "launcher.time=4:00:00", "launcher.nice=100",
        "+launcher.mail-user=me", "launcher.constraint=a100|h100", "launcher.setup=[module load cuda]",
        "launcher.gres=gpu:a100:1", "launcher.memory_gb=64", "launcher.exclusive=true", "launcher.detach=yes",
    ).launcher  # fmt: skip
    assert found == LauncherSettings(
        "slurm", jobs=8, partition="gpu", time=240, constraint="a100|h100", setup=("module load cuda",), detach=True,
        gres="gpu:a100:1", memory_gb=64.0, sbatch={"nice": 100, "mail_user": "me", "exclusive": True},
    )  # fmt: skip


def test_a_users_own_cluster(cli: CommandLine) -> None:
    text = "defaults:\n  - slurm\npartition: gpu\ntime: '1-12:00:00'\nnice: 5\nsetup:\n  - module load cuda\n"
    cli.write("my/launcher/ours.yaml", text)
    found = cli.order("--config-dir", "my", "launcher=ours", "launcher.nice=null").launcher
    assert found == LauncherSettings("slurm", partition="gpu", time=36 * 60, setup=("module load cuda",))
    said = cli.refused("--config-dir", "my", "launcher=ours", "launcher.partiton=x", "launcher.time=soon")
    assert "launcher.partiton='x': unknown key for launcher=slurm" in said
    assert "did you mean 'partition'? (from command line)" in said
    cli.write("my/launcher/ours.yaml", text.replace("'", "").replace("1-12:00:00", "4:00:00").replace("gpu", "[gpu]"))
    said = cli.refused("--config-dir", "my", "launcher=ours")
    assert "launcher.time='4:00:00': YAML reads this as a number to the base 60" in said
    assert said.count("(from my/launcher/ours.yaml)") == 2


# Slurm's times


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("90", 90), ("4:00:00", 240), ("1-12:00:00", 36 * 60), ("2-0", 2880), ("1-6:30", 1830), ("30:00", 30)],
)
def test_times(text: str, value: int) -> None:
    assert minutes(text) == value
    assert slurm(time=text).time == slurm(time=value).time == value


@pytest.mark.parametrize(("time", "signal_s"), [(1, 15), (2, 30), (6, 90), (240, 90)])
def test_a_short_time_is_left_to_the_job(time: int, signal_s: int) -> None:
    assert slurm(time=time).signal_s == slurm(time=time, signal_s=None).signal_s == signal_s
    assert slurm(time=time, signal_s=7).signal_s == 7


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_times_of_every_form_are_the_same_time(days: int, hours: int, mins: int, seconds: int) -> None:
    whole = ((days * 24) + hours) * 60 + mins
    # Slurm's own resolution is a minute, and it rounds up
    up = whole + (seconds > 0)
    assert minutes(f"{days}-{hours}:{mins}:{seconds:02d}") == minutes(f"{days * 24 + hours}:{mins:02d}:{seconds}") == up
    assert minutes(f"{whole}:{seconds}") == up
    assert minutes(f"{days}-{hours:02d}:{mins}") == minutes(str(whole)) == whole
    assert minutes(f"{days}-{hours}") == whole - mins


@pytest.mark.parametrize(
    "text", ["", "4h", "1:2:3:4", "1-", "-1", "1-2-3", "1.5:00", "UNLIMITED", ":30", "1:", "\u0663:00"]
)
def test_what_is_no_time(text: str) -> None:
    assert minutes(text) is None
    assert "days-hours" in refused(name="slurm", time=text)


# sbatch's options


@pytest.mark.parametrize("option", [*SBATCH, *PYXIS, "a_site_plugin"])
def test_options_of_sbatch_are_passed_on(option: str) -> None:
    name = option.replace("-", "_")
    assert slurm(**{option: "x"}).sbatch == slurm(**{name: "x"}).sbatch == {name: "x"}


@pytest.mark.parametrize("value", [1, 1.5, "a b", True, "", None, False])
def test_values_of_options(value: Any) -> None:
    if value == "":
        assert "must be one line" in refused(name="slurm", nice=value)
    else:
        assert slurm(nice=value).sbatch == ({} if value in (None, False) else {"nice": value})


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_coalesce_sets_itself(option: str) -> None:
    for name in (option, option.replace("_", "-")):
        assert f"launcher.{name}=1: cannot be set: {REFUSED[option]}" in refused(name="slurm", **{name: 1})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"partiton": "gpu"}, "did you mean 'partition'?"),
        ({"time_limit": 3, "accout": "x"}, ""),
        ({"setups": ["x"]}, "did you mean 'setup'?"),
        ({"p": "gpu"}, "is no option of sbatch"),
        ({"mail user": "me"}, "is no option of sbatch"),
        ({"nice": [1]}, "launcher.nice=[1]: cannot be passed to sbatch"),
        ({"nice": {"a": 1}}, "cannot be passed to sbatch"),
        ({"nice": float("nan")}, "cannot be passed to sbatch"),
        ({"comment": "a\n#SBATCH --partition=b"}, "must be one line"),
        ({"mail_user": "a", "mail-user": "b"}, "is given twice"),
        ({"gpus_per_node": 1}, "stands beside launcher.gres=gpu:1"),
        ({"gres": "gpu:2"}, "a job uses one GPU"),
        ({"gres": "lustre:2,gpu:a100:4"}, "a job uses one GPU"),
        ({"gres": ""}, "must not be empty"),
        ({"partition": "a\nb"}, "must be one line"),
        ({"partition": True}, "must be text"),
        ({"setup": [1]}, "must be text"),
        ({"setup": ["  "]}, "must not be empty"),
        ({"time": 0}, "out of range; valid: minutes, at least 1"),
        ({"time": "0:00:00"}, "out of range"),
        ({"time": 1.5}, "must be an integer"),
        ({"time": True}, "must be an integer"),
        ({"time": None}, "must not be null"),
        ({"time": 1, "signal_s": 60}, "must be less than launcher.time, which is 60 seconds"),
        ({"signal_s": 0}, "out of range; valid: an integer, at least 1"),
        ({"memory_gb": 0}, "above 0, or null"),
        ({"memory_gb": "64GB"}, "must be a number"),
    ],
)
def test_what_slurm_is_not_told(settings: dict[str, Any], says: str) -> None:
    if says:
        assert says in refused(name="slurm", **settings)
    else:
        with pytest.raises(ConfigError, match="did you mean 'account'"):
            check_launcher({"name": "slurm", **settings})


@pytest.mark.parametrize("name", ["local", "slurm"])
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"jobs": 0}, "out of range; valid: an integer, at least 1, or null"),
        ({"jobs": "many"}, "must be an integer"),
        ({"jobs": [1, 2]}, "must be one integer"),
        ({"experiments_per_job": -1}, "out of range"),
        ({"cpus": 2.5}, "must be an integer"),
        ({"retries": -1}, "at least 0"),
        ({"retries": None}, "must not be null"),
        ({"detach": "perhaps"}, "true or false"),
        ({"poll_s": 0}, "above 0"),
        ({"jbos": 1}, "did you mean 'jobs'?"),
    ],
)
def test_what_jobs_are_not_told(name: str, settings: dict[str, Any], says: str) -> None:
    assert says in refused(name=name, **settings)


def test_keys_of_other_launchers() -> None:
    assert "launcher.jobs=3: unknown key for launcher=process (it is one of launcher=local, launcher=slurm)" in refused(
        jobs=3
    )
    assert "(it is one of launcher=slurm); valid: name, jobs" in refused(name="local", partition="gpu")
    assert "unknown launcher; valid: process, local, slurm; did you mean 'slurm'?" in refused(name="slrum")
    for name in ([1], {"a": 1}, None, 3):
        assert "unknown launcher" in refused(name=name)


def test_numbers_are_names_where_names_are_asked_for() -> None:
    assert slurm(account=1234, partition="1").account == "1234"


def test_gpus_by_another_option() -> None:
    assert slurm(gres=None, gpus=1).sbatch == {"gpus": 1}
    assert slurm(gres="gpu,lustre:2").gres == "gpu,lustre:2"


@pytest.mark.parametrize("name", ["local", "slurm"])
def test_without_submitit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == "submitit" else real(module))
    said = refused(name=name)
    assert "needs the package submitit, which is not installed; valid: pip install 'coalesce[slurm]'" in said
    assert check_launcher({"name": "process"}) == LauncherSettings()
