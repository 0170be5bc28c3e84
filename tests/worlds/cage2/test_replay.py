"""Recorded games of the official simulator: every step is reproduced, and a rule that is broken is found out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from freewheel.core import NDArray
from freewheel.errors import SetupError
from freewheel.worlds.cage2 import network
from freewheel.worlds.cage2.agents import Bline, Meander
from freewheel.worlds.cage2.network import Networks
from tests.support.cage2_replay import replay

OFFICIAL = Path(__file__).parent / "data" / "official"
#: More recordings of the same kind, for who has them.
FOLDERS = [OFFICIAL, *map(Path, filter(None, [os.environ.get("FREEWHEEL_CAGE2_EPISODES")]))]
RECORDINGS = sorted(path for folder in FOLDERS for path in folder.glob("*.npz"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_every_recorded_step_is_reproduced(path: Path) -> None:
    result = replay(path)
    assert result.steps > 0
    assert (result.exact, result.foreseen, result.difference) == (result.steps, result.steps, "")


def _shorter(path: Path, games: int, tmp_path: Path) -> Path:
    with np.load(path, allow_pickle=False) as file:
        count = len(file["seed"])
        short = {name: file[name][-games:] if file[name].shape[:1] == (count,) else file[name] for name in file.files}
    np.savez(tmp_path / path.name, **short)
    return tmp_path / path.name


def _impact_after_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = Networks._restore

    def restored(self: Networks, lanes: NDArray, cells: NDArray) -> None:
        restore(self, lanes, cells)
        self.ot_stoppable[:] = True

    monkeypatch.setattr(Networks, "_restore", restored)


def _files_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = Networks._restore

    def restored(self: Networks, lanes: NDArray, cells: NDArray) -> None:
        files = self.files.copy()
        restore(self, lanes, cells)
        self.files[:] = files

    monkeypatch.setattr(Networks, "_restore", restored)


def _no_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "BRUTE_ATTEMPTS", 1)


def _root_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = Networks._remove

    def removed(self: Networks, lanes: NDArray, cells: NDArray) -> None:
        self.root[cells[cells % 13 != 8]] = 0
        remove(self, lanes, cells)

    monkeypatch.setattr(Networks, "_remove", removed)


@pytest.mark.parametrize("breakage", [_impact_after_restore, _files_survive, _no_brute_force, _root_is_removed])
def test_a_broken_rule_is_found_out(
    breakage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = _shorter(OFFICIAL / "cage2_RedMeanderAgent.npz", 8, tmp_path)
    assert replay(path).difference == ""
    breakage(monkeypatch)
    result = replay(path)
    assert result.exact < result.steps
    assert "cage2_RedMeanderAgent.npz, game" in result.difference


def test_another_red_agent_is_not_foreseen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = _shorter(OFFICIAL / "cage2_B_lineAgent.npz", 3, tmp_path)
    monkeypatch.setattr(Bline, "BACK", np.zeros(15, np.int64))
    result = replay(path)
    assert result.exact == result.steps
    assert result.foreseen < result.steps


def test_a_meander_that_forgets_failures_is_not_foreseen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = _shorter(OFFICIAL / "cage2_RedMeanderAgent.npz", 8, tmp_path)
    monkeypatch.setattr(Meander, "learn", lambda self, success: None)
    assert replay(path).foreseen < replay(path).steps


def test_an_unknown_action_of_reds_is_refused_by_name(tmp_path: Path) -> None:
    with np.load(OFFICIAL / "cage2_SleepAgent.npz", allow_pickle=False) as file:
        record = {name: file[name] for name in file.files}
    record["red_action_vocab"] = np.array(["Dance User0"])
    np.savez(tmp_path / "odd.npz", **record)
    with pytest.raises(SetupError, match="Dance User0"):
        replay(tmp_path / "odd.npz")
