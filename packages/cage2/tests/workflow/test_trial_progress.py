"""A search shows its progress as a panel on a terminal, and otherwise as a line every few seconds."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from freewheel_cage2.workflow.envs import ORDERS
from freewheel_cage2.workflow.search import Proposal, SearchRules, Strategy, TrialOutcome, WorkflowSearch, WorkflowTrial
from freewheel_cage2.workflow.trial_progress import LINE_EVERY, TrialProgress, which_trial

ROW: dict[str, Any] = {
    "episodes": 100, "episodes_per_s": 25.0, "updates": 5, "wall_s": 4.0, "time/learner_update": 0.25,
    "measure/env_return": -58.91, "measure/compliance": None,
}  # fmt: skip


def searched(trials: int = 1, strategy: Strategy = "random") -> WorkflowSearch:
    """Return a search of 1,000 episodes with trials of 200 episodes."""
    rules = SearchRules(
        strategy=strategy, total_episodes=1_000, max_episodes=400, least_episodes=100, threshold=0.9, beta=2.0,
        warm_start=True, fixed_episodes=False, seed=0,
    )  # fmt: skip
    done = [
        WorkflowTrial(
            Proposal(number, ORDERS[number], 400), TrialOutcome(-9.0, 1.0, 0.95, 200, "threshold", f"{number}")
        )
        for number in range(trials)
    ]
    return WorkflowSearch(rules, done)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_line_every_few_seconds_where_there_is_no_terminal() -> None:
    now, console = Clock(), Console(file=io.StringIO(), width=200)
    progress = TrialProgress(console, searched(), Proposal(1, ORDERS[1], 400), (0.0, 0), now)
    now.now = LINE_EVERY - 0.1
    progress.write(ROW)
    assert shown(console) == ""
    now.now = 30.0
    progress.write(ROW | {"episodes": 100, "updates": 10, "wall_s": 8.0})
    progress.write(ROW | {"episodes": 110, "updates": 11, "wall_s": 9.0})
    # 300 of 1,000 episodes in 30 s: 70 s are left. A quarter of 4 s went into 5 updates.
    line = "  100/400 episodes  25 episodes/s  update 10 in 0.2 s  env return -58.9  search 30%, eta 1:10\n"
    assert shown(console) == line
    progress.close({})
    assert shown(console) == line


def test_a_panel_on_a_terminal_that_is_gone_afterwards() -> None:
    now = Clock()
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40, legacy_windows=False)
    progress = TrialProgress(console, searched(), Proposal(1, ORDERS[1], 400), (0.0, 200), now)
    now.now = 10.0
    progress.write(ROW | {"evaluating/ended": 3, "evaluating/episodes": 20})
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(console))
    for part in ("trial 2 of about 5", "100 / 400 episodes", "300 / 1,000 episodes", "eta 1:10", "25 episodes/s",
                 "update 5 in 0.2 s", "evaluating 3/20", "-".join(ORDERS[1])):  # fmt: skip
        assert part in text, part
    progress.close({})
    assert shown(console).count("\x1b[2K") >= text.rstrip().count("\n")  # every line of the panel is erased


@pytest.mark.parametrize(
    ("trials", "strategy", "episodes", "text"),
    [
        (0, "plain", 1_000, "trial 1 of 1"),
        (0, "canonical", 166, "trial 1 of 6"),
        (0, "random", 400, "trial 1 of about 3"),  # 400, 400 and the rest
        (1, "random", 400, "trial 2 of about 5"),  # assumes that later trials are as short as the first
        (4, "gp", 200, "trial 5 of about 5"),
    ],
)
def test_which_trial_it_is(trials: int, strategy: Strategy, episodes: int, text: str) -> None:
    assert which_trial(searched(trials, strategy), Proposal(trials, None, episodes)) == text


def test_before_anything_has_been_played_the_time_left_is_unknown() -> None:
    now, console = Clock(), Console(file=io.StringIO(), width=200)
    progress = TrialProgress(console, searched(0), Proposal(0, ORDERS[0], 400), (0.0, 0), now)
    now.now = 9.0
    progress.write({"episodes": 0, "episodes_per_s": None, "updates": 0, "wall_s": 1.0})
    assert shown(console) == "  0/400 episodes  0 episodes/s  search 0%, eta -\n"
