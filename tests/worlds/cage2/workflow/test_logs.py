"""A search on disk: written whole, read back as it was, and tables that add up."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from freewheel.errors import SetupError
from freewheel.worlds.cage2.workflow.orders import ORDERS
from freewheel.worlds.cage2.workflow.records import SAMPLING, STATE, TRAINING, TRAINING_COLUMNS, Book
from freewheel.worlds.cage2.workflow.search import Outcome, Proposal, Rules, Search, Trial

RULES = Rules("gp", 1000, 100, 10, 0.8)
TRIALS = [
    Trial(Proposal(0, ORDERS[7], 100), Outcome(-12.345678901234567, 27.0, 0.9, 60, "threshold", "000-a")),
    Trial(
        Proposal(1, ORDERS[3], 100, "000-a", False, -3.25, 0.1, -3.05, 0.75),
        Outcome(-20.5, 3.0, 0.1, 100, "plateau", "001-b"),
    ),
    Trial(Proposal(2, None, 50, fixed=True), Outcome(-7.0, 0.0, None, 50, "episodes", "002-none")),
]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def training_row(trial: int, update: int = 1) -> dict[str, Any]:
    return dict.fromkeys(TRAINING_COLUMNS, 0) | {"trial": trial, "update": update, "compliance": None}


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    book = Book(tmp_path / "deep" / "search")
    assert not book.exists
    book.save({"options": {"seed": 3}}, Search(RULES, TRIALS))
    assert book.exists
    assert book.read() == ({"options": {"seed": 3}}, TRIALS)
    assert json.loads((book.folder / STATE).read_text())["best"]["run"] == "000-a"


def test_the_table_of_decisions_says_what_was_expected_and_what_came(tmp_path: Path) -> None:
    Book(tmp_path).save({}, Search(RULES, TRIALS))
    first, second, third = rows_of(tmp_path / SAMPLING)
    assert (first["chosen"], first["mean"], first["failed"]) == ("-".join(ORDERS[7]), "", "False")
    assert (second["mean"], second["std"], second["ucb"], second["feasibility"]) == ("-3.25", "0.1", "-3.05", "0.75")
    assert (second["init"], second["ended"], second["failed"]) == ("000-a", "plateau", "True")
    assert (third["chosen"], third["compliance"]) == ("none", "")
    assert [row["total_episodes"] for row in (first, second, third)] == ["60", "160", "210"]
    for row in (first, second, third):
        assert float(row["env_return"]) + float(row["alignment"]) == pytest.approx(float(row["total_reward"]))


def test_the_training_log_keeps_the_rows_of_finished_trials_alone(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.begin_training(0)
    for trial in (0, 0, 1, 2):
        book.train(training_row(trial))
    with (tmp_path / TRAINING).open("a") as file:
        file.write("1,half a ro")  # killed in the middle of it
    book.begin_training(2)
    assert [row["trial"] for row in rows_of(tmp_path / TRAINING)] == ["0", "0", "1"]
    book.train(training_row(2))
    assert [row["trial"] for row in rows_of(tmp_path / TRAINING)] == ["0", "0", "1", "2"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 9, "asked": {}, "trials": []}', '{"format": 1, "trials": [{}]}']
)
def test_a_damaged_state_is_said_to_be_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE).write_text(text)
    with pytest.raises(SetupError, match=r"search\.json is missing or damaged"):
        Book(tmp_path).read()


def test_a_kill_while_writing_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = Book(tmp_path)
    book.save({}, Search(RULES, TRIALS[:1]))

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        book.save({}, Search(RULES, TRIALS))
    assert book.read()[1] == TRIALS[:1]
