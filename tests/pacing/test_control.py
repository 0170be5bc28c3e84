"""Adaptive control: one way on a steady load, within its limits, and near the best setting on a simulated plant."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.pacing.control import Change, ControlState, Plant, Settings, decide, within

LEAST, MOST = Settings(1, 1, 2, 32), Settings(40, 32, 64, 128)
PLANT = Plant(LEAST, MOST, lanes=1, patience=5)
SHARE = st.floats(0, 1)


def rows(shares: Callable[[Settings], dict[str, float]], read: Callable[[], Settings]) -> Iterator[dict[str, Any]]:
    """A row a second: what the present settings make of the load."""
    wall, steps, updates = 0.0, 0, 0
    while True:
        found = shares(read())
        yield {"wall_s": wall, "env_steps": steps, "updates": updates, **found}
        wall, steps, updates = wall + 1.0, steps + round(found["steps_per_s"]), updates + 1


def run(
    load: Callable[[Settings], dict[str, float]], start: Settings, count: int, plant: Plant = PLANT
) -> list[Settings]:
    """The settings after each row."""
    state, seen = ControlState(start), list[Settings]()
    for row, _ in zip(rows(load, lambda: seen[-1] if seen else start), range(count), strict=False):
        state, change = decide(state, row, plant)
        if change is not None:
            assert change.before != change.after == getattr(state.settings, change.setting)
            assert change.reason
        seen.append(state.settings)
    return seen


WAITS = ("learner_wait_data", "worker_wait_credit", "worker_wait_slot", "worker_wait_gate")
SHARES = dict.fromkeys(("queue_util", "cpu_util", "gpu_util", *(f"time/{wait}" for wait in WAITS)), SHARE)


@settings(max_examples=50)
@given(
    st.fixed_dictionaries({"steps_per_s": st.floats(0, 1e6), "workers/turns": st.integers(1, 40), **SHARES}),
    st.builds(Settings, st.integers(1, 40), st.integers(1, 32), st.integers(2, 64), st.integers(32, 128)),
)
def test_on_a_steady_load_settings_go_one_way_within_limits_and_stay(row: dict[str, float], start: Settings) -> None:
    seen = run(lambda _: row, start, 1_500)
    for name in ("workers", "fragment", "slots", "burst"):
        values = [getattr(one, name) for one in seen]
        assert values in (sorted(values), sorted(values, reverse=True)), name
        assert getattr(LEAST, name) <= min(values) <= max(values) <= getattr(MOST, name)
    assert len(set(seen[-500:])) == 1, "it has settled"


@dataclass(frozen=True)
class Simulated:
    """Workers of so many rows a second each, and a learner; fragments cost both of them time."""

    worker: float  # rows a second
    learner: float  # rows a second
    cost: float = 2e-4  # seconds of a fragment

    def rate(self, settings: Settings) -> float:
        each = 1.0 / (1.0 / self.worker + self.cost / settings.fragment)
        return min(settings.workers * each, 1.0 / (1.0 / self.learner + self.cost / settings.fragment))

    def __call__(self, settings: Settings) -> dict[str, float]:
        rate = self.rate(settings)
        each = 1.0 / (1.0 / self.worker + self.cost / settings.fragment)
        most = 1.0 / (1.0 / self.learner + self.cost / settings.fragment)
        waits = 1.0 - rate / (settings.workers * each)
        acting = settings.workers / MOST.workers
        return {
            "steps_per_s": rate,
            "time/worker_wait_credit": waits * acting,
            "time/worker_wait_gate": 1.0 - acting,
            "time/learner_wait_data": 1.0 - rate / most,
            "queue_util": min(1.0, waits * 20 / settings.slots),
            "cpu_util": 0.5,
            "workers/turns": settings.workers,
        }


@pytest.mark.parametrize("start", [Settings(40, 1, 64), Settings(1, 1, 2), Settings(40, 32, 2), Settings(4, 32, 8)])
@pytest.mark.parametrize("load", [Simulated(1_000, 4_000), Simulated(100, 100_000), Simulated(5_000, 3_000)])
def test_it_comes_near_the_best_from_any_start_and_does_not_swing(start: Settings, load: Simulated) -> None:
    seen = run(load, start, 2_000, replace(PLANT, least=replace(LEAST, burst=0), most=replace(MOST, burst=0)))
    best = max(load.rate(Settings(workers, 32, 64)) for workers in range(1, 41))
    assert load.rate(seen[-1]) >= 0.95 * best
    assert len(set(seen[-1_000:])) == 1
    needed = next(workers for workers in range(1, 41) if load.rate(Settings(workers, 32, 64)) >= 0.95 * best)
    assert seen[-1].workers <= 1.5 * needed + 2, "those that only waited are parked"


def test_a_change_that_brings_less_is_taken_back_and_not_tried_again_soon() -> None:
    def load(settings: Settings) -> dict[str, float]:
        return {"steps_per_s": 100.0 / settings.workers, "time/learner_wait_data": 0.9, "cpu_util": 0.1}

    plant = replace(PLANT, least=replace(LEAST, burst=0), most=replace(MOST, burst=0))
    workers = [one.workers for one in run(load, Settings(4, 32, 8), 400, plant)]
    assert set(workers) == {4, 5}
    assert workers[-1] == 4
    tried = sum(after > before for before, after in itertools.pairwise(workers))
    assert tried <= 4, "each time it waits twice as long"


def test_a_setting_between_two_bands_comes_to_rest() -> None:
    """Two slots are too few and three are too many: nothing fits, and swinging does not help."""

    def load(settings: Settings) -> dict[str, float]:
        return {"steps_per_s": 100.0, "queue_util": 0.3, "time/worker_wait_slot": 0.2 * (settings.slots < 3)}

    slots = [one.slots for one in run(load, Settings(4, 32, 8, 32), 3_000)]
    assert sum(one != other for one, other in itertools.pairwise(slots)) <= 14
    assert len(set(slots[-300:])) == 1


def test_nothing_is_changed_before_a_window_and_one_thing_at_a_time() -> None:
    seen = run(Simulated(1_000, 4_000), Settings(40, 1, 64, 32), 200)
    changes = [at for at, (one, other) in enumerate(itertools.pairwise(seen)) if one != other]
    assert changes[0] >= 2 * PLANT.patience - 1
    assert min(b - a for a, b in itertools.pairwise(changes)) >= 2 * PLANT.patience
    for one, other in itertools.pairwise(seen):
        assert sum(vars(one)[name] != vars(other)[name] for name in vars(one)) <= 1


def test_a_window_lasts_until_there_were_several_updates() -> None:
    """An update takes ten rows: rows that bring nothing say nothing."""
    state, changed = ControlState(Settings(40, 1, 64, 32)), list[Change]()
    for at in range(120):
        lump = {"env_steps": 5_000 * (at // 10), "updates": at // 10, "wall_s": float(at)}
        state, change = decide(state, {**lump, "steps_per_s": 5_000.0 * (at % 10 == 0)}, PLANT)
        changed += [] if change is None else [change]
    assert changed[0].setting == "fragment"
    assert changed[0].reason == "500 fragments a second cost wake-ups", "500 rows/s on average, a step each"


def test_why_is_told() -> None:
    told = str(Change("workers", 40, 5, "the learner is the limit"))
    assert told == "adapt: workers at a time 40 -> 5: the learner is the limit"
    seen = ControlState(Settings(4, 32, 8))
    for at in range(40):
        load = {"time/learner_wait_data": 0.6, "gpu_util": 0.2, "cpu_util": 0.3}
        seen, change = decide(seen, {"wall_s": float(at), "env_steps": at * 100, "updates": at, **load}, PLANT)
        if change is not None:
            assert "workers at a time 4 -> 5: the learner waits for rows 60 % " in str(change)
            assert "(GPU 20 %, CPU 30 %)" in str(change)
            break
    else:
        raise AssertionError("more workers would help")


def test_settings_of_another_machine_are_made_possible() -> None:
    assert within(Settings(100, 1, 1, 500), LEAST, MOST) == Settings(40, 1, 2, 128)
    assert Settings(**ControlState(MOST).to_json()) == MOST
