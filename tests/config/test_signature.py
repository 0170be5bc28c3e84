"""The typed signature of freewheel.train: it has every option, and mypy tells right calls from wrong ones."""

from __future__ import annotations

import inspect
import pydoc
import typing
from pathlib import Path

import pytest

import freewheel
from freewheel.config import arguments
from freewheel.config.resolve import from_options
from tests.support.places import ROOT
from tests.support.runs import python

MODE = """"Literal['auto', 'batch', 'continuous', 'episodes', 'lockstep', 'ray', 'sequential']\""""
#: A call, and what mypy says about it.
CALLS = {
    'train("CartPole-v1", mode="lockstep", steps=100, ppo={"lr": 1e-3, "epochs": 4}, policy={"hidden": [64]})': "",
    'train("CartPole-v1", workers="auto", num_envs=4, runs_dir=Path("runs"), env_args={"gravity": 9.8}, quiet=True)': "",
    'train(lambda: object(), algo="sac", mode="continuous", sac={"updates_per_row": 1}, context=[[1, 0], [0, 1]])': "",
    'train("CartPole-v1", hooks=[Hook()], sinks=["csv"], options={"algo": "td3", "td3": {"lr": 1e-3}})': "",
    'train("CartPole-v1", options={"ppo.lr": 1e-3, "steps": 100})': "",
    'train("CartPole-v1").summary["best_eval"]': "",
    'train("CartPole-v1", mode="lokcstep")': f'"mode" to "train" has incompatible type "Literal[\'lokcstep\']"; expected {MODE}',
    'train("CartPole-v1", algo="pop")': 'Argument "algo" to "train" has incompatible type "Literal[\'pop\']"',
    'train("CartPole-v1", steps="x")': 'Argument "steps" to "train" has incompatible type "str"; expected "int | None"',
    'train("CartPole-v1", stepz=1)': 'Unexpected keyword argument "stepz" for "train"',
    'train("CartPole-v1", ppo={"learning": 1e-3})': 'Extra key "learning" for TypedDict "PPOOptions"',
    'train("CartPole-v1", ppo={"lr": "fast"})': 'TypedDict item "lr" has type "float"',
    'train("CartPole-v1", 100)': 'Too many positional arguments for "train"',
}


def test_every_option_that_is_typed_is_understood() -> None:
    hints = typing.get_type_hints(arguments.TrainOptions)
    assert {"steps", "mode", "ppo", "sac", "mbpo", "policy", "env_args", "num_envs", "step_timeout"} <= hints.keys()
    assert not hints.keys() & set(inspect.signature(freewheel.train).parameters)
    given: arguments.TrainOptions = {"steps": 7, "ppo": {"target_kl": None}, "context": [[1, 2]]}
    given["policy"] = {"hidden": [3, 4]}
    config = from_options("CartPole-v1", given)
    assert (config.run.budget.steps, config.policy.hidden, config.run.context) == (7, (3, 4), ((1.0, 2.0),))


@pytest.mark.system
def test_mypy_tells_right_calls_from_wrong_ones(tmp_path: Path) -> None:
    """Only the signature is followed, so that neither numpy nor torch has to be analysed."""
    lines = ["from pathlib import Path", "from freewheel import Hook, train", *CALLS]
    (tmp_path / "calls.py").write_text("\n".join(lines) + "\n")
    files = [str(tmp_path / "calls.py"), "freewheel/__init__.py", "freewheel/config/arguments.py"]
    options = ["--config-file=", "--strict", "--follow-imports=skip", "--ignore-missing-imports"]
    options += ["--no-warn-return-any", "--allow-subclassing-any", "--explicit-package-bases", "--no-error-summary"]
    options += ["--python-version=3.11"]
    script = "import sys; from mypy import api; out, err, _ = api.run(sys.argv[1:]); print(out + err)"
    told = python("-c", script, *options, f"--cache-dir={ROOT / '.mypy_cache' / 'signature'}", *files).stdout
    found: dict[str, str] = dict.fromkeys(CALLS, "")
    for line in told.strip().splitlines():
        place, _, message = line.partition(": error: ")
        if message:
            assert "calls.py:" in place, line
            found[lines[int(place.rpartition(":")[2]) - 1]] += message
    for call, wanted in CALLS.items():
        assert (wanted in found[call]) if wanted else not found[call], (call, found[call])


def test_help_shows_the_public_names_and_nothing_else() -> None:
    """Under the list of modules that Python itself adds for every package."""
    description, contents = pydoc.plain(pydoc.render_doc(freewheel)).split("PACKAGE CONTENTS")
    assert "result = freewheel.train(" in description
    sections = {part.split("\n", 1)[0] for part in contents.split("\n\n") if part.split("\n", 1)[0].isupper()}
    assert sections == {"CLASSES", "FUNCTIONS", "VERSION", "FILE"}
    assert all(name in contents for name in freewheel.__all__)
    assert set(dir(freewheel)) == {*freewheel.__all__, "__version__"}
    for name in freewheel.__all__:
        assert inspect.getdoc(getattr(freewheel, name)), name
    with pytest.raises(AttributeError, match="module 'freewheel' has no attribute 'trian'"):
        freewheel.trian  # noqa: B018


def test_the_package_is_light_and_names_are_imported_when_they_are_used() -> None:
    python("-c", "import sys, freewheel; assert not {'numpy', 'torch'} & {*sys.modules}; freewheel.Hook.on_update")
