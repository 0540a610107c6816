"""What bad input gets: every problem at once, each with key, value, rule, valid values and the nearest name.

Oracle: the list of bad input in the project's requirements, one row of a table each, with what its message must hold.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coalesce.configuration import check_trainer, make_experiments
from coalesce.errors import ConfigError, Problem
from coalesce.runner.plan import Trainer

TOY = "tasks_for_tests.Toy"


def base(**changes: Any) -> dict[str, Any]:
    return {
        "task": {"_target_": TOY},
        "optimizer": {"name": "sgd"},
        "schedule": {"name": "constant"},
        "steps": 10,
        "batch_size": 4,
        "seed": 0,
        **changes,
    }


def found(given: dict[str, Any], params: Any = None, zips: Any = (), **more: Any) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        make_experiments(given, params or {}, zips, **more)
    return list(caught.value.problems)


def task(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"task": {"_target_": f"tasks_for_tests.{name}", **arguments}}


BAD = [
    # keys and options
    (base(stpes=5), "stpes=5: unknown key", "did you mean 'steps'?"),
    (base(**task("Toy", hiden=3)), "task.hiden=3: unknown argument of", "did you mean 'hidden'?"),
    (base(optimizer={"name": "sgd", "momentun": 1}), "optimizer.momentun=1: unknown key", "did you mean 'momentum'?"),
    (base(schedule={"name": "cosin"}), "schedule.name='cosin': unknown schedule", "did you mean 'cosine'?"),
    (base(optimizer={"lr": 1}), "optimizer={'lr': 1}: must have a name", "sgd, adam, adamw"),
    (base(optimizer=3), "optimizer=3: must have a name", "sgd, adam, adamw"),
    ({k: v for k, v in base().items() if k != "seed"}, "seed=None: is missing", "batch_size"),
    # numbers
    (base(optimizer={"name": "sgd", "lr": -0.1}), "optimizer.lr=-0.1: out of range", "at least 0"),
    (base(optimizer={"name": "sgd", "lr": float("nan")}), "optimizer.lr=nan: must be finite", "finite number"),
    (base(optimizer={"name": "sgd", "lr": "fast"}), "optimizer.lr='fast': must be a number", "finite number"),
    (base(optimizer={"name": "sgd", "lr": None}), "optimizer.lr=None: must not be null", "finite number"),
    (base(optimizer={"name": "sgd", "lr": [0.1, 0.2]}), "one number, not a list", "{optimizer.lr: [0.1, 0.2]}"),
    (base(optimizer={"name": "sgd", "lr": {"a": 1}}), "must be a number, not a mapping", "finite number"),
    (base(optimizer={"name": "sgd", "nesterov": 1}), "optimizer.nesterov=1: must be a boolean", "true or false"),
    (base(optimizer={"name": "adam", "betas": [0.9]}), "optimizer.betas=[0.9]: must be a list of 2", "2 finite"),
    (base(optimizer={"name": "adam", "betas": 0.9}), "optimizer.betas=0.9: must be a list", "2 finite"),
    (base(optimizer={"name": "adam", "betas": [0.9, "x"]}), "optimizer.betas.1='x': must be a number", "2 finite"),
    (base(optimizer={"name": "adam", "betas": [0.9, 1]}), "optimizer.betas.1=1.0: out of range", "below 1"),
    (base(schedule={"name": "cosine", "warmup": 1.5}), "schedule.warmup=1.5: must be an integer", "an integer"),
    (base(steps=0), "steps=0: must be an integer, at least 1", "at least 1"),
    (base(steps=-5), "steps=-5: must be an integer, at least 1", "at least 1"),
    (base(steps=2.5), "steps=2.5: must be an integer", "at least 1"),
    (base(steps=True), "steps=True: must be an integer", "at least 1"),
    (base(steps=[5, 10]), "steps=[5, 10]: must be one integer, not a list", "sweep.params={steps: [5, 10]}"),
    (base(batch_size=0), "batch_size=0: must be an integer, at least 1", "at least 1"),
    (base(batch_size="010"), "batch_size='010'", "octal"),
    (base(seed=-1), "seed=-1: must be an integer from 0", "9223372036854775807"),
    (base(seed=2**63), f"seed={2**63}", "9223372036854775807"),
    # arguments of the task
    (base(**task("Toy", hidden=1.5)), "task.hidden=1.5: must be an integer", "valid: an integer"),
    (base(**task("Toy", dropout=10**400)), "must be finite", "a finite number"),
    (base(**task("Toy", dropout=True)), "task.dropout=True: must be a number", "a finite number"),
    (base(**task("Toy", activation="rleu")), "task.activation='rleu': not a valid choice", "did you mean 'relu'?"),
    (base(**task("Toy", name=3)), "task.name=3: must be text", "quotes"),
    (base(**task("Toy", bias="maybe")), "task.bias='maybe': must be a boolean", "true or false"),
    (base(**task("Toy", sizes=[1, "x"])), "task.sizes.1='x': must be an integer", ""),
    (base(**task("Toy", weights={"a": "x"})), "task.weights.a='x': must be a number", ""),
    (base(**task("Toy", weights=3)), "task.weights=3: must be a mapping", "a mapping, or null"),
    (base(**task("Toy", bound=float("nan"))), "task.bound=nan: must be finite", ""),
    (base(**task("Bare")), "task.rate=None: is missing", "tasks_for_tests.Bare needs it"),
    (base(**task("Bare", rate=1, count=0.5)), "task.count=0.5: must be an integer", "annotate it as float"),
    (base(**task("Open", any=float("inf"))), "task.any=inf: must be finite", ""),
    (base(**task("HoldsClass")), "a configuration cannot hold", "numbers, text"),
    # the task itself
    (base(task={"hidden": 3}), "must name the task class", "_target_"),
    (base(task={"_target_": "???"}), "task._target_='???': is missing", "my_module.MyTask"),
    (base(task={"_target_": "no such class"}), "must name a class", "my_module.MyTask"),
    (base(task={"_target_": "Toy"}), "names no module", "my_module.MyTask"),
    (base(task={"_target_": 3}), "task._target_=3: must name a class", "my_module.MyTask"),
    (base(task={"_target_": "nowhere.at.All"}), "no module named 'nowhere'", "my_module.MyTask"),
    (base(**task("Toi")), "tasks_for_tests has no 'Toi'", "did you mean 'Toy'?"),
    (base(**task("NoTask")), "is not a subclass of coalesce.Task", ""),
    (base(**task("no_class")), "is a function, not a class", ""),
    (base(**task("ByPosition")), "takes 'width' by position only", ""),
    (base(**task("StaticText")), "static is 'threshold'", "('threshold',)"),
    (base(**task("StaticUnknown")), "names 'treshold'", "did you mean 'threshold'?"),
]


@pytest.mark.parametrize(("given", "says", "helps"), BAD, ids=[row[1] for row in BAD])
def test_bad_configuration(given: dict[str, Any], says: str, helps: str) -> None:
    (problem,) = found(given)
    assert says in str(problem)
    assert helps in str(problem)


def test_each_lacking_method_is_named() -> None:
    assert [p.rule for p in found(base(**task("Half")))] == [
        "lacks the method loss(self, model, batch) -> Tensor: the training loss of one batch, a scalar",
        "lacks the method metrics(self, model, batch) -> dict: scalars for evaluation, averaged over a split",
    ]


def test_a_class_that_only_its_function_knows() -> None:
    from tasks_for_tests import Toy

    class Inside(Toy):
        pass

    (problem,) = found(base(task=Inside))
    assert "inside a function" in problem.rule


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path; modules imported from it are forgotten again."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    # and no others: a thread of another test may be importing
    for name, module in [*sys.modules.items()]:
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import not_installed_anywhere", "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("x = 1\nraise RuntimeError('no GPU here')", "RuntimeError: no GPU here"),
        ("def f(:\n  pass", "SyntaxError"),
    ],
)
def test_a_module_that_fails_is_told_with_its_line(modules: Path, code: str, says: str) -> None:
    (modules / "broken_task.py").write_text(code)
    (problem,) = found(base(task={"_target_": "broken_task.Mine"}))
    assert says in problem.rule
    assert "broken_task.py, line " in problem.rule


def test_annotations_that_only_a_type_checker_can_read(modules: Path) -> None:
    code = """
        from __future__ import annotations
        from tasks_for_tests import Toy
        class Mine(Toy):
            def __init__(self, model: Imported = None, rate: float = 1): pass
        """
    (modules / "lazy_task.py").write_text(textwrap.dedent(code))
    # the hint is lost with the others; the default is an integer, and the message says what to do
    (problem,) = found(base(task={"_target_": "lazy_task.Mine", "rate": 0.5}))
    assert "annotate it as float" in problem.rule


BAD_SWEEPS: list[tuple[Any, Any, str, str]] = [
    ({"optimizer.lr": []}, (), "optimizer.lr=[]: has no values to sweep", "at least one value"),
    ({"optimizer.lr": 0.1}, (), "optimizer.lr=0.1: must be a list", "[0.1, 0.01]"),
    ({"optimizer.lr": "0.1,0.2"}, (), "optimizer.lr='0.1,0.2': must be a list", "[0.1, 0.01]"),
    ({"optimizer.lr": [1], "optimizer": {"lr": [2]}}, (), "optimizer.lr=[2]: is swept twice", "once"),
    ({"lr": [0.1]}, (), "lr=[0.1]: unknown key", "did you mean 'optimizer.lr'?"),
    ({"optimizer.lrr": [0.1, 0.2]}, (), "optimizer.lrr=0.1: unknown key for", "did you mean 'lr'?"),
    ({"optimiser": ["sgd"]}, (), "optimiser=['sgd']: unknown key", "did you mean 'optimizer'?"),
    ({"trainer.width": [1, 2]}, (), "trainer.width=[1, 2]: unknown key: no part of an experiment", ""),
    ({"seed.x": [1]}, (), "seed.x=[1]: unknown key", ""),
    ({"optimizer.lr.x": [1]}, (), "optimizer.lr.x=1: unknown key: lr is 0.1, not a mapping", ""),
    ({"task.sizes.7": [1]}, (), "task.sizes.7=1: unknown key: task.sizes is a list of 2", ""),
    ({"task.sizes": [[1, 2]], "task.sizes.0": [1]}, (), "swept together with task.sizes.0", ""),
    ({"optimizer": ["sgdd"]}, (), "optimizer='sgdd': unknown option", "did you mean 'sgd'?"),
    ({"optimizer": [{"name": "sgd"}]}, (), "must be the name of an option of optimizer", "optimizer.<key>"),
    (
        {"optimizer": ["adam", "sgd"], "optimizer.eps": [1]},
        (),
        "optimizer.eps=1: sgd has no such key: give null there, zipped with optimizer: sweep.zip=[[optimizer, ",
        "valid: null where the option has no such key",
    ),
    (
        {"optimizer": ["sgd", "adam", "adamw"], "optimizer.momentum": [0.1, 0.9, 0.5]},
        [["optimizer", "optimizer.momentum"]],
        "optimizer.momentum=0.9: adam and adamw have no such key: give null there",
        "",
    ),
    (
        {"optimizer": ["sgd", "adam"], "optimizer.ep": [None, 1.0]},
        [["optimizer", "optimizer.ep"]],
        "optimizer.ep=1.0: unknown key: adam has no such key; valid: name, lr,",
        "did you mean 'eps'?",
    ),
    # of a key that no option has even null is a slip of the pen
    (
        {"optimizer": ["sgd", "adam"], "optimizer.ep": [None]},
        (),
        "optimizer.ep=None: unknown key: sgd and adam have no such key",
        "did you mean 'eps'?",
    ),
    # where an option has the key, null is a value, and here a bad one
    ({"optimizer": ["sgd", "adam"], "optimizer.eps": [None]}, (), "optimizer.eps=None: must not be null", ""),
    # and without its group, a key is what it always was
    ({"optimizer.eps": [None]}, (), "optimizer.eps=None: unknown key for optimizer 'sgd'", ""),
    (
        {"task": ["tasks_for_tests.Toy", "tasks_for_tests.Pairs"], "task.hiden": [None, 3]},
        [["task", "task.hiden"]],
        "task.hiden=3: unknown key: tasks_for_tests.Pairs has no such key",
        "did you mean 'hidden'?",
    ),
    ({"seed": [1]}, [["sead"]], "sweep.zip='sead': names a key that is not swept", "did you mean 'seed'?"),
    ({"seed": [1], "steps": [1]}, [["seed", "steps"], ["seed"]], "sweep.zip='seed': is zipped twice", ""),
    ({"seed": [1]}, [3], "sweep.zip=3: must be a list of keys", "[[optimizer.lr"),
    ({"seed": [1]}, 3, "sweep.zip=3: must be a list of keys", "[[optimizer.lr"),
    ({"seed": range(10**9), "steps": range(1, 10**9)}, (), "sweep has 999999999000000000 experiments", "sweep.limit"),
]


@pytest.mark.parametrize(("params", "zips", "says", "helps"), BAD_SWEEPS, ids=[row[2] for row in BAD_SWEEPS])
def test_bad_sweeps(params: Any, zips: Any, says: str, helps: str) -> None:
    (problem,) = found(base(), params, zips)
    assert says in str(problem)
    assert helps in str(problem)


def test_what_else_is_wrong_with_a_swept_group_is_told_with_it() -> None:
    params = {"optimizer": ["sgd", "adaam", "adamw"], "optimizer.eps": [None, 1e-3, 1e-4], "optimizer.lr": [1, 2, -3]}
    texts = [str(problem) for problem in found(base(), {**params, "steps": [0]}, [list(params)])]
    assert [text.partition(":")[0] for text in texts] == ["optimizer='adaam'", "steps=0", "optimizer.lr=-3.0"]
    # the misspelt option may be the one that has the key: only what stands at the others is told
    params["optimizer.eps"] = [1e-2, 1e-3, None]
    texts = [str(problem) for problem in found(base(), params, [list(params)])]
    assert any(text.startswith("optimizer.eps=0.01: sgd has no such key") for text in texts)


def test_the_limit_is_the_last_number_allowed() -> None:
    assert len(make_experiments(base(), {"seed": range(5)}, limit=5)[0]) == 5
    assert [p.key for p in found(base(), {"seed": range(6)}, limit=5)] == ["sweep.limit"]


def test_everything_is_reported_at_once() -> None:
    given = base(steps=0, foo=1, task={"_target_": TOY, "dropout": "wet"})
    params = {
        "optimizer.lr": [0.1, "fast", -1],
        "optimizer.momentum": [0.5, 0.9],
        "seed": range(10**6),
        "batch_size": [],
        "nonsense": [1],
        "schedule.warmup": [0, "long"],
    }
    before = Problem("runs", "x", "found earlier")
    problems = found(given, params, [["optimizer.lr", "optimizer.momentum"]], problems=[before])
    assert {(p.key, str(p.value)[:7]) for p in problems} == {
        ("runs", "x"),
        ("foo", "1"),
        ("steps", "0"),
        ("task.dropout", "wet"),
        ("optimizer.lr", "fast"),
        ("sweep.zip", "['optim"),
        ("sweep.limit", "10000"),
        ("batch_size", "[]"),
        ("nonsense", "[1]"),
        ("schedule.warmup", "long"),
    }
    # one more value lies beyond the shorter list of its zip group: it belongs to no experiment
    assert len(problems) == 10


def test_a_problem_of_many_experiments_is_told_once() -> None:
    assert len(found(base(steps=0), {"seed": range(100), "optimizer.lr": [0.1, 0.2]})) == 1


def test_a_right_value_in_the_sweep_replaces_a_wrong_one_in_the_base() -> None:
    (experiment,) = make_experiments(base(optimizer={"name": "sgd", "lr": "fast"}), {"optimizer.lr": [0.1]})[0]
    assert experiment.config["optimizer"]["lr"] == 0.1


def test_only_combinations_that_would_run_are_judged() -> None:
    # Nesterov needs momentum: right in each pair, wrong in the product's other members and in the base
    params = {"optimizer.nesterov": [True, False], "optimizer.momentum": [0.9, 0.0], "batch_size": []}
    zips = [["optimizer.nesterov", "optimizer.momentum"]]
    assert [p.key for p in found(base(), params, zips)] == ["batch_size"]


def test_problems_say_where_the_value_stands() -> None:
    def source(key: str) -> str:
        return "the sweep's file" if key.startswith("sweep.params.") else "the base's file"

    given = base(steps=0, optimizer={"name": "adam"})
    problems = found(given, {"optimizer.betas": [[0.9, "x"]], "seed": 3}, source=source)
    assert {p.key: p.source for p in problems} == {
        "steps": "the base's file",
        "optimizer.betas.1": "the sweep's file",
        "seed": "the sweep's file",
    }


# the trainer


def trainer_problems(**settings: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_trainer(settings)
    return [str(problem) for problem in caught.value.problems]


def test_trainer_defaults() -> None:
    assert check_trainer({}) == Trainer()
    assert (
        check_trainer({"show": "test/loss"}) == check_trainer({"show": ["test/loss"]}) == Trainer(show=("test/loss",))
    )


def test_trainer_settings_arrive_in_their_type() -> None:
    trainer = check_trainer({"width": "8", "every": 1e2, "compile": "off", "threads": "null", "evaluate_every": 300})
    assert trainer == Trainer(width=8, every=100, evaluate_every=300, compile=False, threads=None)
    assert {type(trainer.width), type(trainer.every)} == {int}
    assert check_trainer({"threads": 1, "width": "auto"}).threads == 1
    assert check_trainer({"memory_gib": "1"}) == Trainer(memory_gib=1.0)
    assert check_trainer({"memory_gib": None}) == check_trainer({"pieces": "auto"}) == Trainer()
    for minutes, kept in ((None, None), (0, 0.0), ("1e-1", 0.1), ("null", None)):
        assert check_trainer({"snapshot_minutes": minutes}).snapshot_minutes == kept
    assert check_trainer({"pieces": ["blocks.*"]}).pieces == ("blocks.*",)
    for given, right in ((None, None), ("auto", "auto"), (4, 4), (["a"], ("a",))):
        assert check_trainer({"checkpoint": given}).checkpoint == right


@pytest.mark.parametrize(("given", "every"), [(7, 7), (50, 50), (100, 100), (300, 100)])
def test_an_evaluation_has_a_boundary(given: int, every: int) -> None:
    """``every``, left out, is no more than ``evaluate_every``."""
    for left_out in ({}, {"every": None}, {"every": "null"}):
        assert check_trainer({"evaluate_every": given, **left_out}) == Trainer(every=every, evaluate_every=given)


@pytest.mark.parametrize(
    ("settings", "says", "helps"),
    [
        ({"pieces": "blocks"}, "trainer.pieces='blocks': must be auto or patterns", '["blocks.*"]'),
        ({"checkpoint": "blocks"}, "trainer.checkpoint='blocks': must be null, auto, a number", "such as 8"),
        ({"checkpoint": 0}, "trainer.checkpoint=0: must be at least 1 piece", "at least 1 piece"),
        ({"checkpoint": True}, "trainer.checkpoint=True: must be null, auto, a number", "such as 8"),
        ({"pieces": ["a", 1]}, "trainer.pieces=['a', 1]: must be auto or patterns", '["blocks.*"]'),
        ({"width": 0}, "trainer.width=0: must be at least 1", '"auto"'),
        ({"width": "wide"}, "trainer.width='wide': must be an integer", '"auto"'),
        ({"width": 1.5}, "trainer.width=1.5: must be an integer", '"auto"'),
        ({"every": 0}, "trainer.every=0: must be at least 1", "an integer, at least 1, or null"),
        ({"every": True}, "trainer.every=True: must be an integer", "an integer, at least 1"),
        ({"every": 30, "evaluate_every": 100}, "trainer.evaluate_every=100: must be a multiple", "30, 60, 90"),
        ({"every": 100, "evaluate_every": 50}, "trainer.every, which is 100", "or trainer.every=50 beside it"),
        ({"every": 300}, "trainer.evaluate_every=500: must be a multiple", "or trainer.every=100 beside it"),
        ({"evaluate_every": 150}, "trainer.every, which is 100", "or trainer.every=50 beside it"),
        ({"evaluate_every": 0}, "trainer.evaluate_every=0: must be at least 1", "an integer"),
        ({"evaluate_batch_size": None}, "trainer.evaluate_batch_size=None: must not be null", "an integer"),
        ({"threads": 0}, "trainer.threads=0: must be at least 1", "or null"),
        ({"compile": "maybe"}, "trainer.compile='maybe': must be a boolean", "true or false"),
        ({"stack": 1}, "trainer.stack=1: must be a boolean", "true or false"),
        ({"weights": None}, "trainer.weights=None: must not be null", "true or false"),
        ({"device": "gpu"}, "trainer.device='gpu': not a valid choice", "auto, cpu, cuda"),
        ({"mode": "maxx"}, "trainer.mode='maxx': not a valid choice", "did you mean 'max'?"),
        ({"monitor": " "}, "trainer.monitor=' ': must name a metric", "val/accuracy"),
        ({"monitor": 3}, "trainer.monitor=3: must be text", ""),
        ({"show": 3}, "trainer.show=3: must be a list", ""),
        ({"show": ["a", 3]}, "trainer.show.1=3: must be text", ""),
        ({"memory_gib": 0}, "trainer.memory_gib=0: must be finite and above 0", "or null for all that is free"),
        ({"memory_gib": "inf"}, "trainer.memory_gib='inf'", "a number above 0"),
        ({"memory_gib": "most"}, "trainer.memory_gib='most': must be a number", "or null for all that is free"),
        ({"snapshot_minutes": -1}, "trainer.snapshot_minutes=-1: must be finite and at least 0", "or null"),
        ({"snapshot_minutes": "1e999"}, "trainer.snapshot_minutes='1e999'", "a number, at least 0, or null"),
        ({"snapshot_minutes": "often"}, "trainer.snapshot_minutes='often': must be a number", "at least 0, or null"),
        ({"widht": 3}, "trainer.widht=3: unknown key", "did you mean 'width'?"),
    ],
)
def test_bad_trainer(settings: dict[str, Any], says: str, helps: str) -> None:
    (text,) = trainer_problems(**settings)
    assert says in text
    assert helps in text


def test_trainer_problems_come_together() -> None:
    assert len(trainer_problems(width=0, evry=1, evaluate_every=150, device="tpu")) == 4
