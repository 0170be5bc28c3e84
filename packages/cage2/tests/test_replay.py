"""Recorded games of the official simulator: every step is reproduced, and a broken rule is detected."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from freewheel.errors import SetupError
from freewheel_cage2 import network
from freewheel_cage2.agents import BlineAgent, MeanderAgent
from packages.cage2.tests.support.cage2_replay import replay

OFFICIAL = Path(__file__).parent / "data" / "official"
#: A folder with further recordings of the same kind, if there is one.
FOLDERS = [OFFICIAL, *map(Path, filter(None, [os.environ.get("FREEWHEEL_CAGE2_EPISODES")]))]
RECORDINGS = sorted(path for folder in FOLDERS for path in folder.glob("*.npz"))


@pytest.mark.parametrize("games", [6, pytest.param(None, marks=pytest.mark.system)])
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_every_recorded_step_is_reproduced(path: Path, games: int | None, tmp_path: Path) -> None:
    result = replay(_shorter(path, games, tmp_path) if games else path)
    assert result.steps > 0
    assert (result.exact, result.foreseen, result.difference) == (result.steps, result.steps, "")


def _shorter(path: Path, games: int, tmp_path: Path) -> Path:
    with np.load(path, allow_pickle=False) as file:
        count = len(file["seed"])
        short = {name: file[name][-games:] if file[name].shape[:1] == (count,) else file[name] for name in file.files}
    np.savez(tmp_path / path.name, **short)
    return tmp_path / path.name


def test_a_broken_rule_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "BRUTE_ATTEMPTS", 1)
    result = replay(_shorter(OFFICIAL / "cage2_RedMeanderAgent.npz", 6, tmp_path))
    assert result.exact < result.steps
    assert "cage2_RedMeanderAgent.npz, game" in result.difference


@pytest.mark.parametrize("forgetful", [BlineAgent, MeanderAgent])
def test_another_red_agent_is_not_foreseen(
    forgetful: type[BlineAgent | MeanderAgent], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(BlineAgent, "BACK", np.zeros(15, np.int64))
    monkeypatch.setattr(MeanderAgent, "learn", lambda self, success: None)
    red = {BlineAgent: "B_lineAgent", MeanderAgent: "RedMeanderAgent"}[forgetful]
    result = replay(_shorter(OFFICIAL / f"cage2_{red}.npz", 6, tmp_path))
    assert result.exact == result.steps
    assert result.foreseen < result.steps


def test_an_unknown_action_of_reds_is_refused_by_name(tmp_path: Path) -> None:
    with np.load(OFFICIAL / "cage2_SleepAgent.npz", allow_pickle=False) as file:
        record = {name: file[name] for name in file.files}
    record["red_action_vocab"] = np.array(["Dance User0"])
    np.savez(tmp_path / "odd.npz", **record)
    with pytest.raises(SetupError, match="Dance User0"):
        replay(tmp_path / "odd.npz")
