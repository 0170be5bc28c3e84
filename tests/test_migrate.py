"""docs/migrating.md: its code runs, every option of ours in it exists, and every word that the code knows is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from freewheel.config import flags, synonyms
from freewheel.config.resolve import options_type
from freewheel_cage2.workflow.command import SearchOptions
from tests.support.places import ROOT
from tests.support.runs import python

PAGE = (ROOT / "docs" / "migrating.md").read_text()
LINES = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| ") and "theirs" not in line]
ROWS = [line for line in LINES if len(line) != 2]  # options; objects have two columns
SECTIONS = {text.split("\n")[0]: text for text in PAGE.split("\n## ") if "```python" in text}


def ours() -> set[str]:
    """Every option that there is in `train` and `workflow search`."""
    argv = ["--algo ppo --mode continuous", "--algo sac --mode episodes", "--algo mbpo --mode lockstep"]
    found = {name for line in argv for name in flags.option_types(options_type(["isaaclab:X", *line.split()]))}
    return found | flags.option_types(SearchOptions).keys()


def test_every_option_of_ours_exists() -> None:
    named = {flags.canonical(name) for row in ROWS for name in re.findall(r"`--([a-z.-]+)", row[1])}
    assert len(named) > 40
    assert named - {"red_agent"} <= ours()  # a keyword argument of the environment


def test_no_row_is_empty_and_all_have_three_columns() -> None:
    assert len(ROWS) > 50
    for row in ROWS:
        assert len(row) == 3
        assert row[0].strip()
        assert row[1].strip() or row[2].strip()


def listed(word: str) -> str:
    """What the page says of a word of others."""
    found = [row for row in ROWS if word in re.findall(r"`-*([a-z_]+)", row[0].replace("-", "_").replace("`__", "`"))]
    return "\n".join(row[1] + row[2] for row in found)


def test_every_word_is_listed_beside_what_it_became() -> None:
    became = {word: [option] for word, option in synonyms.OPTIONS.items()} | synonyms.LEARNER
    wrong = [
        (word, option)
        for word, options in became.items()
        for option in options
        if not re.search(rf"`--(\w+\.)?{option.replace('_', '-')}`", listed(word))
    ]
    assert wrong == []
    assert [word for word in synonyms.ANSWERS if "answered" not in listed(word)] == []


def test_every_name_of_a_mode_is_listed() -> None:
    for word, mode in synonyms.MODES.items():
        assert any(f"`--mode {word}`" in row[0] and f"`--mode {mode}`" in row[1] for row in ROWS), word


@pytest.mark.system
@pytest.mark.timeout(180)
@pytest.mark.parametrize("section", SECTIONS)
def test_the_code_runs_as_it_stands(section: str, tmp_path: Path) -> None:
    """The blocks of a section, then what the cells of ours begin with; budgets are 64 steps for each 100,000."""
    cells = re.findall(r"^\| [^|]* \| `(?!freewheel )([^`]+)`[^|]*\|$", SECTIONS[section], re.MULTILINE)
    code = "\n".join(re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL) + cells)
    (tmp_path / "page.py").write_text(re.sub(r"(\d)00_000", lambda steps: str(64 * int(steps[1])), code))
    python("page.py", cwd=tmp_path)
