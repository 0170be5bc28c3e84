"""The examples, run as a person would run them: from another directory, with their own defaults."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.runs import python

FOLDER = ROOT / "examples"
#: What each script says at its end.
SAID = {
    "own_env.py": r"to the door in \d+ steps",
    "compare_modes.py": r"continuous +\d+ env steps/s",
    "masks.py": r"packed in the order",
    "curriculum.py": r"every corridor is walked after \d+ steps",
    "continuous_actions.py": r"-?\d+ ± \d+ over 20 episodes",
    "export_policy.py": r"with Freewheel (\[.*\]) without \1",
    "mbpo.py": r"return \d+ after 1,2\d\d real steps",
    "cage2.py": r"return -\d\d ± \d+ over 100 games",
    "isaac_lab.py": r"collect  continuous: 64 envs",
}


def test_every_script_is_short_and_tested() -> None:
    scripts = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in FOLDER.glob("*.py")}
    assert scripts.keys() == SAID.keys()
    assert max(scripts.values()) < 60


@pytest.mark.system
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", SAID)
def test_a_script_does_what_it_says(name: str, tmp_path: Path) -> None:
    words = ["--dry-run"] * (name == "isaac_lab.py")  # it needs Isaac Lab and minutes
    assert re.search(SAID[name], python(str(FOLDER / name), *words, cwd=tmp_path).stdout)


@pytest.mark.system
@pytest.mark.timeout(180)
def test_the_notebook_runs_in_a_real_kernel(tmp_path: Path) -> None:
    out = tmp_path / "first_day.ipynb"
    shutil.copy(FOLDER / out.name, out)
    python("-W", "ignore", "-c", "from nbclient.cli import main; main()", "--inplace", str(out), cwd=tmp_path)
    cells = json.loads(out.read_text(encoding="utf-8"))["cells"]
    assert not [output for cell in cells for output in cell.get("outputs", ()) if output["output_type"] == "error"]
    assert re.search(r"-\d+\.\d ± \d+\.\d\n\[\[", "".join(cells[-1]["outputs"][0]["text"])), "the score, then the path"
