"""The tree of exceptions, its exit codes, and help for misspelt names."""

from __future__ import annotations

import pickle

import pytest

from freewheel import errors
from freewheel.errors import (
    CheckpointError,
    EnvError,
    FreewheelError,
    LedgerError,
    SetupError,
    UsageError,
    nearest,
)

CODES = {UsageError: 2, SetupError: 1, EnvError: 1, LedgerError: 1, CheckpointError: 1}


def test_the_docstring_has_the_whole_tree() -> None:
    found = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FreewheelError)}
    assert found == {FreewheelError, *CODES}
    lines = (errors.__doc__ or "").splitlines()
    for kind in found:
        (line,) = (line for line in lines if kind.__name__ in line.split())
        assert f"exit {kind.exit_code}" in line


@pytest.mark.parametrize(("kind", "code"), CODES.items(), ids=lambda value: getattr(value, "__name__", value))
def test_every_error_has_the_base_class_and_a_code(kind: type[FreewheelError], code: int) -> None:
    with pytest.raises(FreewheelError, match="what is wrong") as caught:
        raise kind("what is wrong\nand more")
    assert caught.value.exit_code == code
    assert str(caught.value) == "what is wrong\nand more"


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.__name__)
def test_errors_can_be_pickled(kind: type[FreewheelError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("lane 3 raised")))  # noqa: S301
    assert type(copy) is kind
    assert str(copy) == "lane 3 raised"


def test_an_env_error_has_its_report() -> None:
    assert EnvError("lane 3 raised").report == "lane 3 raised"


@pytest.mark.parametrize(
    ("name", "help_"),
    [
        ("lockstepp", "; did you mean 'lockstep'?"),
        ("sequental", "; did you mean 'sequential'?"),
        ("xyz", "; choose from batch, lockstep, sequential"),
    ],
)
def test_help_for_misspelt_names(name: str, help_: str) -> None:
    assert nearest(name, ["sequential", "lockstep", "batch"]) == help_
