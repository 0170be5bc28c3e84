"""The schedule of evaluations, by a clock that the test moves and an evaluator that takes as long as it is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import pytest

from freewheel.config.resolve import EvalOptions
from freewheel.core import Snapshot
from freewheel.errors import EnvError, FreewheelError
from freewheel.metrics.meter import Budget
from freewheel.run.evaluation.episodes import Score
from freewheel.run.evaluation.players import EpisodeRequest
from freewheel.run.evaluation.schedule import CLOSING, Around, Evaluation, EvaluationSchedule
from freewheel.seeding import closing_seed

SKIPPED = "evaluations are skipped: one takes about {} s, and all of them may take 10% of the time (--eval-share)"


@dataclass
class World:
    """A run of 100 s and its evaluator: each poll that waits takes that long, an order takes `takes` seconds."""

    takes: float = 1.0
    step: float = 0.0  # seconds that an evaluator expects for a step
    in_turn: bool = False
    replays: bool = True
    now: float = 0.0
    slept: float = 0.0
    longest: int = 10
    means: list[float] = field(default_factory=list)  # of scores to come, else 1
    notes: list[str] = field(default_factory=list)
    orders: list[tuple[float, EpisodeRequest]] = field(default_factory=list)
    error: FreewheelError | None = None
    cancelled: int = 0
    waits: int = 0
    progress: tuple[int, int] = (7, 20)

    def start(self, order: EpisodeRequest, *, alone: bool) -> None:
        self.orders.append((self.now, order))

    def poll(self, wait: float) -> Sequence[Score] | FreewheelError | None:
        began, order = self.orders[-1]
        if not self.replays:
            return [self.score()]
        self.now += min(wait, max(0.0, began + self.takes - self.now))
        if self.now < began + self.takes - 1e-9:
            return None
        return self.error or [self.score() for _ in order.weights]

    def score(self) -> Score:
        mean = self.means.pop(0) if self.means else 1.0
        return Score((mean - 1, mean + 1), (5, 5))

    def cancel(self) -> None:
        self.cancelled += 1

    def seconds(self, length: int, games: int, *, alone: bool) -> float:
        return self.step * length

    def games(self, length: int, seconds: float) -> int:
        return int(seconds / (self.step * length)) * 20 if self.step else 1000

    def waiting(self) -> None:
        self.waits += 1

    def schedule(self, budget: Budget | None = None, **options: float) -> EvaluationSchedule:
        clocks = (lambda: self.now, lambda: self.now - self.slept, lambda: self.longest)
        around = Around(*clocks, self.notes.append, self.waiting)
        return EvaluationSchedule(self, EvalOptions(**options), budget or Budget(steps=1000), around)  # type: ignore[arg-type]

    def run(self, schedule: EvaluationSchedule, seconds: float = 100.0, turn: float = 0.5) -> list[Evaluation]:
        """Turns of the loop until the end of a run of 1000 steps."""
        found: list[Evaluation] = []
        while self.now < seconds:
            self.now += turn
            step = int(10 * self.now)
            found += schedule.turn(step, self.now / seconds, lambda step=step: weights(step))  # type: ignore[misc]
        schedule.stop(1000, weights(1000))
        return found

    def ran(self, **options: float) -> EvaluationSchedule:
        """A schedule, after the run."""
        schedule = self.schedule(None, **options)
        self.run(schedule)
        return schedule


def weights(step: int) -> Snapshot:
    return Snapshot(step, {})


def test_evaluations_are_evenly_spaced_on_the_same_seed_and_the_last_is_the_closing_one() -> None:
    world = World()
    schedule = world.schedule()
    found = world.run(schedule)
    assert [began for began, _ in world.orders] == [20.0, 40.0, 60.0, 80.0]
    assert {(order.seed, order.episodes) for _, order in world.orders} == {(1000, 20)}
    assert [one.step for one in found] == [200, 400, 600, 800]
    assert (schedule.skipped, world.notes, world.waits) == (0, [], 0)


def test_one_that_is_due_while_another_runs_waits_with_the_newest_weights_and_those_between_are_skipped() -> None:
    world = World(takes=5.0)
    schedule = world.schedule(eval_share=0.1, evals=50)
    found = world.run(schedule)
    assert [began for began, _ in world.orders] == [2.0, 52.0], "5 s are a tenth of 50 s"
    assert [one.step for one in found] == [20, 520]
    assert schedule.skipped == 49 - 2
    assert world.notes == [SKIPPED.format("5.0")]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_evaluations_in_turn_hold_the_run_up_for_no_more_than_their_share(share: float) -> None:
    world = World(takes=1.5, in_turn=True)
    world.ran(eval_share=share, evals=100)
    held_up = 1.5 * len(world.orders)
    assert held_up <= max(2.0, share * 100.0) + 1.5
    assert held_up >= min(0.6 * share * 100, 60.0)
    assert world.waits > len(world.orders), "nobody would see that it evaluates"


def test_two_seconds_are_always_allowed_so_that_short_runs_have_their_evaluations() -> None:
    world = World(takes=0.02)
    schedule = world.schedule()
    assert len(world.run(schedule, seconds=1.0, turn=0.01)) == 4
    assert schedule.skipped == 0


def test_one_that_takes_longer_than_all_may_is_given_up_and_is_no_candidate() -> None:
    world = World(takes=30.0)
    schedule = world.schedule()
    assert world.run(schedule) == []
    assert [began for began, _ in world.orders] == [20.0], "the others would not fit either"
    assert (world.cancelled, schedule.candidate, schedule.skipped) == (1, None, 3)
    given_up = "no evaluation at step 200: 7 of 20 episodes had ended after 10.0 s, which is all the time it may take"
    assert world.notes[0].startswith(given_up)


def test_one_is_not_given_up_because_the_run_was_stopped_meanwhile() -> None:
    world = World(takes=3.0)
    schedule = world.schedule(Budget(steps=1000))
    assert schedule.turn(200, 0.2, lambda: weights(200)) == []
    world.orders[-1] = (world.now + 1000.0, world.orders[-1][1])
    world.now, world.slept = world.now + 1001.0, 1000.0  # 1 s of them it ran
    assert schedule.turn(210, 0.21, lambda: weights(210)) == []
    world.now += 2.5
    assert [found.step for found in schedule.turn(220, 0.22, lambda: weights(220))] == [200]
    assert (world.cancelled, world.notes) == (0, [])


def test_one_that_is_known_to_take_too_long_is_not_begun() -> None:
    world = World(step=0.05, longest=300)
    schedule = world.schedule()
    assert world.run(schedule) == []
    assert (world.orders, schedule.skipped) == ([], 4)
    assert world.notes == [SKIPPED.format("15.0")]


def test_a_failure_is_reported_and_the_next_one_is_tried() -> None:
    world = World(error=EnvError("boom"))
    schedule = world.schedule(evals=3)
    assert world.run(schedule) == []
    assert world.notes == ["no evaluation at step 335: boom", "no evaluation at step 670: boom"]
    verdict = schedule.close()
    assert (verdict.best, verdict.final, verdict.why) == (None, None, "no closing evaluation: boom")
    assert world.notes[-1] == verdict.why


def test_candidate_and_last_weights_are_scored_again_on_the_same_fresh_episodes() -> None:
    world = World(means=[10.0, 30.0, 20.0, 5.0, 12.0, 11.0])
    schedule = world.ran()
    assert schedule.candidate is not None
    assert (schedule.candidate.step, schedule.candidate.score.mean) == (400, 30.0)
    verdict = schedule.close()
    _, order = world.orders[-1]
    assert [one.version for one in order.weights] == [400, 1000]
    assert (order.seed, order.episodes) == (closing_seed(1000), 20)
    assert verdict.summary() == {
        "best_eval": 12.0, "best_eval_std": 1.0, "best_step": 400, "final_eval": 11.0, "final_eval_std": 1.0,
        "eval_episodes": 2, "eval_fresh": True, "eval_fresh_seed": closing_seed(1000), "eval_note": None,
    }  # fmt: skip
    assert schedule.close() is verdict, "it is scored once"


def test_the_last_weights_are_the_best_where_they_are_better_on_fresh_episodes() -> None:
    verdict = World(means=[10.0, 30.0, 20.0, 5.0, 12.0, 13.0]).ran().close()
    assert (verdict.best, verdict.summary()["best_step"]) == (verdict.final, 1000)


def test_without_a_candidate_only_the_last_weights_are_scored() -> None:
    world = World(means=[3.0])
    schedule = world.schedule(evals=1)
    assert world.run(schedule) == []
    verdict = schedule.close()
    assert len(world.orders[-1][1].weights) == 1
    assert (verdict.best, verdict.fresh) == (verdict.final, True)


def test_the_closing_evaluation_has_a_bound_and_then_the_candidate_keeps_the_score_that_chose_it() -> None:
    world = World(means=[10.0])
    schedule = world.ran(evals=2)
    world.takes, began = 1e9, world.now
    verdict = schedule.close()
    assert world.now == pytest.approx(began + CLOSING, abs=0.2)
    assert world.cancelled == 1
    assert world.waits > 100
    assert (verdict.best, verdict.final, verdict.fresh) == (schedule.candidate, None, False)
    assert verdict.why.startswith("no closing evaluation: 7 of 20 episodes had ended after 60.")


@pytest.mark.parametrize(
    ("step", "kept"),
    [(0.0, 1.0), (0.2, 1.15 * 2.0 + 1.0), (1.0, 1.15 * 10.0 + 1.0), (2.7, 30.0), (5.0, 0.0)],  # 5: no episode would fit
)
def test_the_time_for_the_closing_evaluation_is_kept_up_to_a_bound(step: float, kept: float) -> None:
    world = World(step=step)
    assert world.schedule(Budget(minutes=1.0)).reserve == pytest.approx(kept)
    assert world.schedule(Budget(steps=1000)).reserve == 0.0


def test_with_limited_minutes_it_ends_with_them_and_plays_only_what_fits() -> None:
    world = World(step=1.0, longest=10, takes=10.0, now=49.0)
    schedule = world.schedule(Budget(minutes=1.0), eval_episodes=100)
    schedule.stop(500, weights(500))
    schedule.close()
    assert world.orders[-1][1].episodes == 20
    assert world.notes == ["the closing evaluation plays 20 of 100 episodes: more would take too long"]
    world = World(step=1.0, longest=10, takes=10.0, now=55.0)
    schedule = world.schedule(Budget(minutes=1.0))
    schedule.stop(500, weights(500))
    assert schedule.close().why == "no closing evaluation: an episode of 10 steps does not fit in the 8.0 s left"
    assert world.orders == []


def test_what_runs_when_training_ends_is_not_waited_for() -> None:
    world = World(takes=5.0)
    schedule = world.schedule(evals=2)
    world.run(schedule, seconds=54.0)
    assert (len(world.orders), schedule.skipped, world.cancelled) == (1, 0, 0)
    world = World(takes=60.0)
    schedule = world.ran(evals=2, eval_share=1.0)
    assert (world.cancelled, schedule.skipped, schedule.progress) == (1, 1, {})


def test_progress_is_told_while_an_evaluation_runs() -> None:
    world = World(takes=5.0)
    schedule = world.schedule(evals=2)
    world.now = 50.0
    schedule.turn(500, 0.5, lambda: weights(500))
    assert schedule.progress == {"evaluating/ended": 7, "evaluating/episodes": 20}
    world.now = 56.0
    assert len(schedule.turn(560, 0.56, lambda: weights(560))) == 1
    assert schedule.progress == {}


def test_reserved_lanes_cannot_play_old_weights_again() -> None:
    verdict = World(replays=False, means=[4.0, 9.0, 7.0]).ran(evals=3).close()
    assert verdict.best is not None
    assert verdict.final is not None
    assert (verdict.best.score.mean, verdict.final.score.mean, verdict.fresh) == (9.0, 7.0, False)
    assert "reserved lanes" in verdict.why


def test_a_run_that_was_cut_keeps_its_candidate_and_says_so() -> None:
    schedule = World(means=[10.0]).ran(evals=2)
    verdict = schedule.without_closing()
    assert (verdict.best, verdict.fresh) == (schedule.candidate, False)
    assert verdict.summary()["eval_note"] == "the run did not reach its closing evaluation"


@pytest.mark.parametrize("cut", [10.0, 45.0, 99.5])
def test_a_schedule_goes_on_from_its_state(cut: float) -> None:
    straight = World(means=[1.0, 4.0, 3.0, 2.0])
    schedule = straight.schedule()
    expected = straight.run(schedule)
    world = World(means=[1.0, 4.0, 3.0, 2.0])
    first = world.schedule()
    found: list[Evaluation] = []
    while world.now < cut:
        world.now += 0.5
        step = int(10 * world.now)
        found += first.turn(step, world.now / 100, lambda step=step: weights(step))  # type: ignore[misc]
    state = json.loads(json.dumps(first.state(), allow_nan=False))
    best = None if first.candidate is None else first.candidate.snapshot
    second = world.schedule()
    second.restore(state, best)
    assert second.candidate == first.candidate
    found += world.run(second)
    assert found == expected
    assert [began for began, _ in world.orders] == [began for began, _ in straight.orders]
    assert (second.skipped, second.candidate) == (schedule.skipped, schedule.candidate)


def test_an_evaluation_under_way_is_begun_anew_and_a_candidate_without_weights_is_forgotten() -> None:
    world = World(takes=5.0)
    first = world.schedule()
    world.now = 20.0
    first.turn(200, 0.2, lambda: weights(200))
    assert first.progress, "it runs"
    again = World(takes=5.0, now=21.0)
    second = again.schedule()
    second.restore(first.state(), None)
    second.turn(210, 0.21, lambda: weights(210))
    assert [order.weights[0].version for _, order in again.orders] == [210]
    scored = first.state() | {"candidate": {"step": 3, "score": asdict(Score((1.0,), (2,)))}}
    third = again.schedule()
    third.restore(scored, None)
    assert third.candidate is None
    third.restore(scored, weights(3))
    assert third.candidate == Evaluation(3, weights(3), Score((1.0,), (2,)))
