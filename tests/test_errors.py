"""The tree of exceptions, its exit codes, and help for misspelt names."""

from __future__ import annotations

import pickle

import pytest

from freewheel import errors
from freewheel.errors import EnvError, FreewheelError, nearest

OTHERS = ("Setup", "Env", "Ledger", "Checkpoint", "Observation", "CollectorLost", "NothingLearned", "Disk", "Diverged")
CODES: dict[type[FreewheelError], int] = {errors.UsageError: 2, errors.ConsentError: 2}
CODES |= {getattr(errors, f"{name}Error"): 1 for name in (*OTHERS, "File", "Measure", "PeerLost")}


def test_the_docstring_has_the_whole_tree() -> None:
    found = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FreewheelError)}
    assert found == {FreewheelError, *CODES}
    lines = (errors.__doc__ or "").splitlines()
    for kind in found:
        (line,) = (line for line in lines if kind.__name__ in line.split())
        assert f"exit {kind.exit_code}" in line


@pytest.mark.parametrize(("kind", "code"), CODES.items(), ids=lambda value: getattr(value, "__name__", value))
def test_every_error_is_ours_has_a_code_and_travels_between_processes(kind: type[FreewheelError], code: int) -> None:
    travelled = pickle.loads(pickle.dumps(kind("what is wrong\nand more")))  # noqa: S301
    assert (type(travelled), travelled.exit_code, str(travelled)) == (kind, code, "what is wrong\nand more")
    assert isinstance(travelled, FreewheelError)
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
