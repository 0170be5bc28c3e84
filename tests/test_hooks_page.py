"""docs/hooks.md, run as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import freewheel
from freewheel.run.hooks import EVENTS
from tests.support.places import ROOT
from tests.support.runs import python

PAGE = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_tables_name_every_method_and_every_attribute() -> None:
    first, second = PAGE.split("| of the run | |")
    assert re.findall(r"^\| `(on_\w+)\(run", first, re.MULTILINE) == list(EVENTS)
    public = {name for name in vars(freewheel.Run) if not name.startswith("_")} - {"stopping"}
    forms = (".{}`", "run.{}(", "run.{}`")
    assert {name for name in public if any(form.format(name) in second for form in forms)} == public


def run(folder: Path, example: int) -> str:
    """What an example prints."""
    (folder / "page.py").write_text(EXAMPLES[example].replace("hooks=[", "quiet=True, log_every=1e-9, hooks=["))
    return python("page.py", cwd=folder).stdout


@pytest.mark.system
def test_the_schedule_falls_to_a_tenth(tmp_path: Path) -> None:
    run(tmp_path, 0)
    folder = tmp_path / "runs" / "CartPole-v1-ppo-lockstep"
    summary, config = (json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "config"))
    assert summary["logged"]["my/learning_rate"] == pytest.approx(config["ppo"]["lr"] / 10)


@pytest.mark.system
def test_the_curriculum_reaches_its_end_and_stops_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, 1) == "every corridor is walked\n"
    rows = next(tmp_path.glob("runs/*/metrics.jsonl")).read_text().splitlines()
    assert max(json.loads(row).get("my/longest", 0.0) for row in rows) > 2


@pytest.mark.system
def test_every_evaluation_has_its_video(tmp_path: Path) -> None:
    videos = run(tmp_path, 2).split()
    assert len(videos) == 2
    assert all((tmp_path / video).read_bytes().startswith(b"GIF") for video in videos)
