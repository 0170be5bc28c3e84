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
    assert {
        name for name in public if f".{name}`" in second or f"run.{name}(" in second or f"run.{name}`" in second
    } == public


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """All examples in one process, and the lines that they print after a heading of each."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "page.py").write_text(
        "\n\nprint('----')\n".join(EXAMPLES).replace("hooks=[", "quiet=True, log_every=1e-9, hooks=[")
    )
    return folder / "runs", python("page.py", cwd=folder).stdout.split("----\n")


def test_the_schedule_falls_to_a_tenth(told: tuple[Path, list[str]]) -> None:
    run = told[0] / "CartPole-v1-ppo-lockstep"
    summary, config = (json.loads((run / f"{name}.json").read_text()) for name in ("summary", "config"))
    assert summary["logged"]["my/learning_rate"] == pytest.approx(config["ppo"]["lr"] / 10)


def test_the_curriculum_reaches_its_end_and_stops_the_run(told: tuple[Path, list[str]]) -> None:
    assert told[1][1] == "every corridor is walked\n"
    rows = (told[0] / "__main___Corridor-ppo-lockstep" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["my/longest"] > 2
