"""Names of runs: numbered where nobody asked for one, refused where somebody did, never given twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from freewheel.cli.main import main
from freewheel.config.resolve import from_options
from freewheel.errors import SetupError, UsageError
from freewheel.files.lock import FileLock
from freewheel.run.naming import RunName, find_run, name_run
from tests.support.runs import IDENTITY, train

USUAL = "tests.support.worlds_Identity-ppo-lockstep"


def test_runs_without_a_name_are_numbered(tmp_path: Path) -> None:
    config = from_options(IDENTITY, {"runs_dir": tmp_path})
    assert [name_run(config).claim().name for _ in range(3)] == [USUAL, f"{USUAL}-2", f"{USUAL}-3"]


def test_a_name_that_was_asked_for_is_given_or_refused(tmp_path: Path) -> None:
    config = from_options(IDENTITY, {"runs_dir": tmp_path, "run": "mine"})
    chosen = name_run(config)
    chosen.claim()
    refused = r"^run 'mine' exists in .*; choose another --run or remove it$"
    with pytest.raises(SetupError, match=refused):
        name_run(config)
    with pytest.raises(SetupError, match=refused):
        chosen.claim()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with FileLock(tmp_path / "mine" / ".lock"), pytest.raises(SetupError, match=refused):
        chosen.claim()
    (tmp_path / "mine" / ".part-config.json").touch()
    assert name_run(config).claim() == chosen, "it was killed before it had written anything"


def test_runs_that_start_at_the_same_moment_get_directories_of_their_own(tmp_path: Path) -> None:
    count = 8
    planned, together = RunName(tmp_path / "runs", "it").free(), Barrier(count, timeout=10)

    def claim(_: int) -> str:
        together.wait()
        return planned.claim().name

    with ThreadPoolExecutor(count) as pool:
        names = set(pool.map(claim, range(count)))
    assert names == {path.name for path in (tmp_path / "runs").iterdir()}
    assert names == {"it", *(f"it-{number}" for number in range(2, count + 1))}


LONG = "n" * 300


@pytest.mark.parametrize("given", [{"run": LONG}, {"run": "é" * 120}, {"runs_dir": f"a/{LONG}/b"}])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, given: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"^'(n|é){30}\.\.\.' has (300|240) bytes, a name here has at most (255|230)"):
        name_run(from_options(IDENTITY, {"runs_dir": tmp_path, **given}))
    with pytest.raises(UsageError, match="has 300 bytes"):
        find_run(LONG, str(tmp_path))


@pytest.mark.parametrize("words", [["runs", "--runs-dir", LONG], ["train", IDENTITY, "--run", LONG], ["resume", LONG]])
def test_on_the_command_line_that_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_config_of_a_run_does_not_collide_with_its_own_name(tmp_path: Path) -> None:
    """A name that comes from a file is the base of a numbered one."""
    first = train(tmp_path, run="mine", steps=64, evals=0)
    for number in (2, 3):
        config = from_options(IDENTITY, {"config": str(first.path / "config.json")})
        assert name_run(config).claim().path == tmp_path / f"mine-{number}"
    again = from_options(IDENTITY, {"config": str(first.path / "config.json"), "run": "mine"})
    with pytest.raises(SetupError, match="run 'mine' exists"):
        name_run(again)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"cannot create .*file/it: File exists; choose another --runs-dir"):
        RunName(tmp_path / "file", "it").claim()
