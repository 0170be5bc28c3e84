"""docs/using.md, run as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

PAGE = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


def python(folder: Path, *argv: str) -> str:
    """The output of Python in this folder."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_the_page_works_as_it_stands(tmp_path: Path) -> None:
    assert sorted(EXAMPLES) == ["elsewhere.py", "service.py", "using.py"]
    for name, code in EXAMPLES.items():
        (tmp_path / name).write_text(code)
    shown = re.fullmatch(r"return (\d+), scored (\d+)\n", python(tmp_path, "using.py"))
    assert shown is not None
    assert int(shown[1]) > 30, "chance is about 20"
    ask = "import json, service; print(json.dumps(service.answer({'observations': [[0, 0, 0.1, 0.5], [0, 0, -0.1, -0.5]]})))"
    assert json.loads(python(tmp_path, "-c", ask)) == {"actions": [1, 0]}
    (command,) = re.findall(r"freewheel (export mine --out policy)\n", PAGE)
    python(tmp_path, "-m", "freewheel", *command.split())
    assert re.fullmatch(r"\[[01] [01] [01]\]\n", python(tmp_path, "elsewhere.py"))
