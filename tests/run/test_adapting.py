"""--adapt in a run: changes are told with their reasons, written down, and kept by a resumed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.errors import UsageError
from freewheel.pacing import control
from tests.support.runs import Kept, assert_balanced, rows_of, train

IDENTITY = "tests.support.worlds:Identity"
FAST: dict[str, Any] = {"adapt": True, "adapt_patience": 1, "evals": 0, "log_every": 0.02}


def changes(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "adapt.jsonl").read_text().splitlines()]


def test_fragments_become_longer_and_a_resumed_run_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "FRAGMENTS", 10.0)  # a second, which any machine makes
    kept = Kept()
    options: dict[str, Any] = {"mode": "continuous", "workers": 2, "collection_batch_size": 1, "steps": 2_000}
    result = train(tmp_path, sinks=[kept], **FAST, **options)
    first = changes(result.path)[0]
    assert (first["setting"], first["before"]) == ("fragment", 1)
    assert first["reason"].endswith("fragments a second cost wake-ups")
    said = [note for note in kept.notes if note.startswith("adapt: ")]
    assert said[0] == f"adapt: steps of a fragment 1 -> {first['after']}: {first['reason']}"
    assert len(said) == len(changes(result.path))
    rows = rows_of(result)
    assert max(row["fragment/steps"] for row in rows) > rows[0]["fragment/steps"] == 1
    assert_balanced(result.summary)
    assert result.summary["lag_max"] <= 2
    later = rows_of(freewheel.resume(result.path, steps=2_500, quiet=True))[len(rows) :]
    assert later[0]["fragment/steps"] == rows[-1]["fragment/steps"]


@pytest.mark.parametrize("mode", ["episodes", "continuous"])
def test_a_replay_learner_may_make_more_updates_at_a_time(tmp_path: Path, mode: str) -> None:
    sac = {"learning_starts": 64, "batch": 16, "updates_per_row": 1.0}
    result = train(
        tmp_path, "tests.support.worlds:IdentityBox", **FAST, mode=mode, algo="sac", workers=4, num_steps_per_env=1,
        sac=sac, policy={"hidden": [8]}, steps=300,
    )  # fmt: skip
    assert_balanced(result.summary)
    assert result.summary["ended"] == "steps"


@pytest.mark.parametrize("mode", ["sequential", "lockstep", "batch"])
def test_other_modes_refuse_it_in_one_line(tmp_path: Path, mode: str) -> None:
    with pytest.raises(UsageError) as refused:
        train(tmp_path, mode=mode, adapt=True)
    assert "adapt is an option of mode continuous or episodes" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_it_nothing_is_written(tmp_path: Path) -> None:
    assert not (train(tmp_path, mode="continuous", workers=2, steps=320, evals=0).path / "adapt.jsonl").exists()
