"""The closing save of a run: files at the same time, none half written, and rows of metrics while it goes on."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import freewheel
from freewheel.core import NDArray
from freewheel.learn.replay.buffer import ReplayBuffer
from freewheel.learn.replay.rows import Columns
from freewheel.run.checkpoints import checkpoint, segments
from freewheel.run.checkpoints.checkpoint import MANY, POLICY, WEIGHTS
from freewheel.run.checkpoints.segments import Segments


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


def files_of(content: Any) -> dict[str, checkpoint.Content]:
    return {WEIGHTS: b"w", POLICY: b"p"} | {f"replay-{n}.safetensors": content for n in range(MANY)}


def test_files_of_a_save_that_is_waited_for_are_written_at_the_same_time(tmp_path: Path) -> None:
    two, waits = threading.Barrier(2), list[int]()

    def content() -> bytes:
        two.wait(10)  # breaks unless another file is being written
        time.sleep(2 * checkpoint.LOOK)
        return b"rows"

    files = files_of(content)
    listed = checkpoint.write(tmp_path / "1", files, waiting=lambda: waits.append(1))
    assert list(listed) == list(files)
    assert {path.name for path in (tmp_path / "1").iterdir()} == {*files, checkpoint.MANIFEST}
    assert listed["replay-0.safetensors"] == checkpoint.entry_of(b"rows")
    assert waits


def test_one_that_fails_leaves_nothing_and_ends_the_others(tmp_path: Path) -> None:
    tried = list[int]()

    def content() -> bytes:
        tried.append(1)
        time.sleep(0.05)
        raise OSError("no space")

    files = files_of(content)
    with pytest.raises(OSError, match="no space"):
        checkpoint.write(tmp_path / "1", files, waiting=lambda: None)
    assert len(tried) < MANY
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shared", [True, False])
def test_a_learner_that_waits_has_no_row_copied_before_writing(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    columns = Columns(1, 1)
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 16 * columns.width * 4)
    monkeypatch.setattr(ReplayBuffer, "shared", shared)
    replay, read = ReplayBuffer(64, columns, "cpu", 0), list[tuple[int, int]]()
    replay.add(torch.arange(40.0)[:, None].expand(-1, columns.width))
    reading = replay.read

    def counted(first: int, end: int) -> NDArray:
        read.append((first, end))
        return reading(first, end)

    monkeypatch.setattr(replay, "read", counted)
    cut = Segments("replay", replay).cut(still=True)
    assert read == []
    for given in cut.files.values():
        assert callable(given)
        given()
    assert read == [(0, 16), (16, 32), (32, 40)]


def test_rows_of_metrics_are_written_while_the_run_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 512)
    put = checkpoint._put

    def slowly(path: Path, given: checkpoint.Content) -> checkpoint.ManifestEntry:
        time.sleep(0.3 if path.name.startswith("replay-") else 0.0)
        return put(path, given)

    monkeypatch.setattr(checkpoint, "_put", slowly)
    sac = {"learning_starts": 50, "batch": 8}
    given: dict[str, Any] = {"steps": 200, "evals": 0, "log_every": 0.2, "policy": {"hidden": [8]}, "sac": sac}
    result = freewheel.train("Pendulum-v1", algo="sac", mode="sequential", runs_dir=str(tmp_path), quiet=True, **given)
    rows = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    assert len([row for row in rows if row["updates"] == rows[-1]["updates"]]) >= 3
    assert result.summary["shares"]["learner"]["save"] * result.summary["wall_s"] > 0.5
