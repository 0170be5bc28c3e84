"""docs/start.md, run as it stands."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.runs import python

PAGE = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.system
@pytest.mark.timeout(240)
def test_the_page_works_as_it_stands(tmp_path: Path) -> None:
    assert sorted(EXAMPLES) == ["elsewhere.py", "service.py", "using.py"]
    for name, code in EXAMPLES.items():
        (tmp_path / name).write_text(code)

    def told(*words: str) -> str:
        return python(*words, cwd=tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)])).stdout

    shown = re.fullmatch(r"return (\d+), scored (\d+)\n", told("using.py"))
    assert shown is not None
    assert int(shown[1]) > 30, "chance is about 20"
    ask = "import json, service; print(json.dumps(service.answer({'observations': [[0, 0, 0.1, 0.5], [0, 0, -0.1, -0.5]]})))"
    assert json.loads(told("-c", ask)) == {"actions": [1, 0]}
    (command,) = re.findall(r"freewheel (export mine --out policy)\n", PAGE)
    told("-m", "freewheel", *command.split())
    assert re.fullmatch(r"\[[01] [01] [01]\]\n", told("elsewhere.py"))
