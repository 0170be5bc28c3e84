"""When the first rows and the first update are expected, and what would end before them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from freewheel.config.resolve import from_argv
from freewheel.core import ActionSpec
from freewheel.errors import UsageError
from freewheel.rollout.probe import EnvCost
from freewheel.run.advice.first_update import _about, beginning_of, checked
from freewheel.run.naming import name_run
from freewheel.run.plan import Plan
from freewheel.run.planning import arrange
from tests.support.costs import SPEC

BOX = replace(SPEC, action=ActionSpec("box", 2, (-1.0, -1.0), (1.0, 1.0)))
WAITS = EnvCost(spec=BOX, wall=0.01, row=0.01, cpu=1e-5, times=(0.01,), steps=100)  # 100 steps/s
ONE = "--mode continuous --workers 1 --num-envs 1"


def planned(words: str, tmp_path: Path, cost: EnvCost = WAITS) -> Plan:
    config = from_argv(["Toy-v0", *words.split(), "--runs-dir", str(tmp_path)])
    return arrange(config, cost, name_run(config), "cpu")


@pytest.mark.parametrize(
    ("words", "steps", "rows", "seconds"),
    [
        (f"--algo sac {ONE}", 1, 1001, (0.01, 10.01)),
        (f"--algo sac {ONE} --num-steps-per-env 400 --collection-batch-size 200", 200, 1001, (2.0, 10.01)),
        (f"--algo mbpo {ONE} --mbpo.learning-starts 500 --mbpo.updates-per-row 0.25", 1, 504, (0.01, 5.04)),
        ("--algo sac --mode sequential --num-envs 2", 1, 1001, (0.02, 10.01)),
        ("--algo sac --mode sequential --num-envs 1 --num-steps-per-env 100", 64, 1001, (0.64, 10.01)),
        ("--mode batch --workers 2 --num-envs 2 --num-steps-per-env 300", 300, 600, (3.0, 3.0)),
    ],
)
def test_first_rows_and_update(tmp_path: Path, words: str, steps: int, rows: int, seconds: tuple[float, float]) -> None:
    begins = beginning_of(planned(f"{words} --steps 100000", tmp_path))
    assert (begins.steps, begins.rows) == (steps, rows)
    assert begins.seconds == pytest.approx(seconds, rel=0.05)


def test_the_plan_says_so(tmp_path: Path) -> None:
    lines = checked(planned(f"--algo sac {ONE} --steps 9000", tmp_path)).lines()
    first = "the first rows come after 1 step of each env"
    assert f"note     {first}, the first update after 1,001 rows: in about 0.1 s and 10 s" in lines
    quick = replace(WAITS, wall=1e-5, row=1e-5, cpu=1e-5, times=(1e-5,))
    assert not checked(planned("--steps 9000", tmp_path, quick)).remarks, "PPO learns within the blink of an eye"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (f"--algo sac {ONE} --steps 1000 --sac.learning-starts 1000",
         "--steps 1,000 .* first update .* takes 1,001 rows.* fewer --sac.learning-starts"),
        (f"--algo mbpo {ONE} --minutes 0.3 --mbpo.learning-starts 5000",
         "--minutes 0.3 .* first update .* takes 5,001 rows, in about 50 s.* more time"),
        (f"--algo sac {ONE} --num-steps-per-env 4000 --collection-batch-size 3000 --minutes 0.2",
         "--minutes 0.2 .* first rows .3,000 steps of each env take about 30 s.* smaller --collection-batch-size"),
        ("--mode batch --workers 1 --num-envs 1 --num-steps-per-env 5000 --minutes 0.3",
         "--minutes 0.3 .* first rows .5,000 steps of each env take about 50 s.* or --num-steps-per-env"),
        ("--mode sequential --num-envs 1 --num-steps-per-env 9000 --minutes 0.5",
         "--minutes 0.5 .* first update .an update takes 9,000 rows, in about 2 min.* smaller --num-steps-per-env"),
    ],
)  # fmt: skip
def test_what_would_deliver_nothing_is_refused(tmp_path: Path, words: str, told: str) -> None:
    with pytest.raises(UsageError, match=f"^{told}"):
        checked(planned(words, tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        f"--algo sac {ONE} --steps 1001",
        f"--algo mbpo {ONE} --minutes 0.5",  # twice as fast as predicted it would come to that
        "--mode sequential --num-envs 1 --num-steps-per-env 9000 --steps 100",  # an update of PPO is finished
        "--mode episodes --episodes-per-update 20 --workers 1 --minutes 0.01",  # nobody knows how long they are
    ],
)
def test_what_may_deliver_something_is_not(tmp_path: Path, words: str) -> None:
    checked(planned(words, tmp_path))


@pytest.mark.parametrize(
    ("words", "rows", "note"),
    [
        (f"--algo sac {ONE} --steps 1000", 251, "--sac.learning-starts 250: --steps 1000 would end before"),
        (f"--algo mbpo {ONE} --minutes 0.3", 226, "--mbpo.learning-starts 225: --minutes 0.3 would end before"),
        ("--mode sequential --num-envs 1 --minutes 0.4", 16, "--num-steps-per-env 16: --minutes 0.4 would end before"),
        (f"--preset acrobot-sac {ONE} --steps 1000", 254, "--sac.learning-starts 250: --steps 1000 would end before"),
        (f"--algo sac {ONE} --steps 1001", 1001, ""),
        ("--mode sequential --num-envs 1 --minutes 5", 2048, ""),
    ],
)
def test_what_was_left_out_is_chosen_to_fit_into_a_short_run(tmp_path: Path, words: str, rows: int, note: str) -> None:
    cost = WAITS if "--minutes 0.4" not in words else replace(WAITS, wall=0.15, row=0.15)
    found = checked(planned(words, tmp_path, cost))
    assert beginning_of(found).rows == rows
    assert bool(note) == any(remark.startswith(note) for remark in found.remarks if note)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.004, "0.1 s"), (0.26, "0.3 s"), (7.4, "7 s"), (45.0, "40 s"), (500.0, "8 min"), (1e4, "3 h")],
)
def test_predictions_have_one_figure(seconds: float, text: str) -> None:
    assert _about(seconds) == text
