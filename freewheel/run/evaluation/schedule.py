"""Decides when weights are evaluated, for how long, and which are the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from freewheel.config.resolve import EvalOptions
from freewheel.core import Snapshot
from freewheel.errors import FreewheelError
from freewheel.metrics.meter import Budget
from freewheel.run.evaluation.episodes import Score
from freewheel.run.evaluation.players import EpisodeRequest, Evaluator, SlowCall
from freewheel.run.stopping.stop import LATE
from freewheel.seeding import closing_seed

FREE = 2.0  # seconds that evaluations may always take, whatever their share of the time is
CLOSING = 60.0  # seconds that the closing evaluation may always take in a run without a limit of minutes
RESERVED = 0.5  # share of a run's minutes that is reserved for its closing evaluation, at most
MARGIN, START = 1.15, 1.0  # factor on the expected time of the closing evaluation, and seconds to start it
WAIT = 0.1  # seconds between two polls


class Evaluation(NamedTuple):
    """The score of the weights at one step."""

    step: int
    snapshot: Snapshot
    score: Score


@dataclass(frozen=True)
class UnderWay:
    """A running evaluation."""

    since_s: float
    limit_s: float  # seconds that it may take
    ended: int  # episodes
    episodes: int
    call: SlowCall | None = None


@dataclass(frozen=True)
class Around:
    """The run around the schedule: its clocks and callbacks."""

    wall_s: Callable[[], float]  # seconds since the run began
    ran_s: Callable[[], float]  # the same without the time in which the run was stopped
    longest: Callable[[], int]  # steps of the longest recent training episode
    note: Callable[[str], None]
    waiting: Callable[[], None]  # called repeatedly while training waits for an evaluation; may raise to end the wait


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run: its best weights and its last ones.

    If there was time, both were scored on the same fresh episodes, whose seeds were not used to choose the candidate.
    """

    best: Evaluation | None = None
    final: Evaluation | None = None
    fresh: bool = False
    why: str = ""  # why the scores are not fresh
    seed: int | None = None  # of the fresh episodes

    def summary(self) -> dict[str, Any]:
        """Return the fields for summary.json."""

        def of(found: Evaluation | None, name: str) -> dict[str, float | None]:
            mean, spread = (None, None) if found is None else (found.score.mean, found.score.spread)
            return {f"{name}_eval": mean, f"{name}_eval_std": spread}

        counted = self.final or self.best
        return {
            **of(self.best, "best"),
            "best_step": self.best and self.best.step,
            **of(self.final, "final"),
            "eval_episodes": len(counted.score.returns) if counted is not None else 0,
            "eval_fresh": self.fresh,
            "eval_fresh_seed": self.seed,
            "eval_note": self.why or None,
        }


class EvaluationSchedule:
    """Runs the evaluations during a run, within their share of its time, and the closing evaluation.

    During training, weights are scored on the episodes of --eval-seed; the best become the candidate. An evaluation
    that is due while another one runs, or too soon after it, waits; of several that are due, all but one are skipped.
    One that exceeds its time is given up: the episodes that have ended by then would be a biased sample of short ones.
    """

    def __init__(self, evaluator: Evaluator | None, options: EvalOptions, budget: Budget, run: Around) -> None:
        self._evaluator, self._options, self._budget, self._run = evaluator, options, budget, run
        self.candidate: Evaluation | None = None
        self.skipped = 0
        self._taken = 0  # due evaluations that were begun or skipped
        self._due = 0
        self._running: tuple[int, Snapshot] | None = None
        self._began = self._deadline = 0.0
        self._spent = 0.0  # seconds of evaluations so far
        self._next = 0.0  # no evaluation begins before this time
        self._takes = 0.0  # seconds of the last evaluation
        self._told = self._warned = False
        self._last: tuple[int, Snapshot] | None = None
        self._verdict: Verdict | None = None

    @property
    def active(self) -> bool:
        """Return whether there are any evaluations."""
        return self._evaluator is not None

    @property
    def progress(self) -> dict[str, int]:
        """Return the progress of a running evaluation for a row of metrics."""
        if self._running is None or self._evaluator is None:
            return {}
        return dict(zip(("evaluating/ended", "evaluating/episodes"), self._evaluator.progress, strict=True))

    @property
    def under_way(self) -> UnderWay | None:
        """Return the running evaluation. Any thread may call this."""
        if self._running is None or self._evaluator is None:
            return None
        since, limit = self._run.ran_s() - self._began, self._deadline - self._began
        return UnderWay(since, limit, *self._evaluator.progress, self._evaluator.slowest())

    @property
    def reserve(self) -> float:
        """Return the seconds of a run's limited time that the closing evaluation needs."""
        minutes = self._budget.minutes
        if self._evaluator is None or not self._evaluator.replays or minutes is None:
            return 0.0
        most, length = RESERVED * 60 * minutes, self._length()
        games = min(self._games(), self._evaluator.games(length, most))
        if not games:
            return 0.0
        return min(most, MARGIN * max(self._evaluator.seconds(length, games, alone=True), self._takes) + START)

    def turn(self, step: int, progress: float, weights: Callable[[], Snapshot]) -> Sequence[Evaluation]:
        """Begin an evaluation if one is due and may begin; return those that have ended. progress: 0 to 1."""
        if self._evaluator is None:
            return ()
        found = [] if self._running is None else self._look(0.0)
        planned = self._options.evals
        self._due = min(int(progress * planned), planned - 1)
        if self._running is not None or self._due <= self._taken:
            return found
        now = self._run.ran_s()
        allowed = max(FREE, self._options.eval_share * now / progress) - self._spent
        if self._spent > FREE and now < self._next:
            return found
        takes = max(self._evaluator.seconds(self._length(), self._options.eval_episodes, alone=False), self._takes)
        if takes > allowed:
            self._skip(self._due - self._taken, takes)
            return found
        self._skip(self._due - self._taken - 1, takes)
        snapshot = weights()
        self._begin(
            (step, snapshot), EpisodeRequest([snapshot], self._options.eval_seed, self._options.eval_episodes), allowed
        )
        while self._running is not None and self._evaluator.in_turn:
            found += self._look(WAIT)
            if self._running is not None:
                self._run.waiting()
        return found

    def stop(self, step: int, weights: Snapshot) -> None:
        """End the evaluations of training, which has ended with these weights; unfinished ones are skipped."""
        if self._evaluator is None:
            return
        self._last = step, weights
        if not self._evaluator.replays:
            self._verdict = self._without_fresh_seeds(self._evaluator)
            return
        if self._running is not None:
            self._evaluator.cancel()
            self._running, self.skipped = None, self.skipped + 1
        self._skip(self._due - self._taken, self._takes)

    def close(self) -> Verdict:
        """Score the candidate and the last weights on the same fresh episodes; the better ones are the best."""
        if self._verdict is None:
            self._verdict = self._closing()
            if self._verdict.why:
                self._run.note(self._verdict.why)
        return self._verdict

    def without_closing(self) -> Verdict:
        """Return the candidate with the score that chose it, for a run that did not reach its end."""
        return self._verdict or Verdict(self.candidate, why="the run did not reach its closing evaluation")

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run, for JSON; the candidate's weights are saved as the best ones. That run
        repeats a running evaluation, with the weights that it then has."""
        found = self.candidate
        return {
            "skipped": self.skipped,
            "taken": self._taken - (self._running is not None),
            "spent_s": self._spent,
            "next_s": self._next,
            "takes_s": self._takes,
            "told": self._told,
            "candidate": None if found is None else {"step": found.step, "score": asdict(found.score)},
        }

    def restore(self, state: Mapping[str, Any], best: Snapshot | None) -> None:
        """Continue from a saved state. best: the candidate's weights; None: the next evaluation chooses."""
        self.skipped, self._taken, self._told = state["skipped"], state["taken"], state["told"]
        self._spent, self._next, self._takes = state["spent_s"], state["next_s"], state["takes_s"]
        found = state["candidate"]
        if found is not None and best is not None:
            score = found["score"]
            self.candidate = Evaluation(
                found["step"],
                best,
                Score(
                    tuple(score["returns"]),
                    tuple(score["lengths"]),
                    score["cut"],
                    dict(score["measures"]),
                    tuple(map(tuple, score["contexts"])),
                    score.get("failed", 0),  # missing in runs of older versions
                    score.get("failure", ""),
                ),
            )

    # --------------------------------------------------------------------------------------------------- one evaluation

    def _begin(
        self, which: tuple[int, Snapshot], order: EpisodeRequest, allowed: float, *, alone: bool = False
    ) -> None:
        assert self._evaluator is not None, "checked by the callers"
        self._taken = max(self._taken, self._due)
        self._running, self._began = which, self._run.ran_s()
        self._deadline = self._began + allowed
        self._evaluator.start(order, alone=alone)

    def _look(self, wait: float) -> list[Evaluation]:
        """Return the running evaluation if it has ended by now; give it up at its deadline."""
        assert self._running is not None, "checked by the callers"
        (step, snapshot), result = self._running, self._poll(wait)
        if self._running is not None or result is None:
            return []
        if isinstance(result, FreewheelError):
            self._run.note(f"no evaluation at step {step}: {result}")
            return []
        self._warn(result)
        found = Evaluation(step, snapshot, result[0])
        if self.candidate is None or found.score.mean > self.candidate.score.mean:
            self.candidate = found
        return [found]

    def _poll(self, wait: float) -> Sequence[Score] | FreewheelError | None:
        assert self._running is not None, "checked by the callers"
        assert self._evaluator is not None, "checked by the callers"
        result = self._evaluator.poll(wait)
        took = self._run.ran_s() - self._began
        if result is None:
            if self._began + took < self._deadline:
                return None
            ended, wanted = self._evaluator.progress
            self._evaluator.cancel()
            took *= 1.5  # an estimate: it would have taken longer
            reason = (
                f"{ended} of {wanted} episodes had ended after {took / 1.5:.1f} s, which is all the time it may take"
            )
            result = FreewheelError(f"{reason} (--eval-share, --minutes)")
        self._running, self._takes = None, took
        self._spent += took
        self._next = self._began + took / self._options.eval_share
        return result

    def _warn(self, scores: Sequence[Score]) -> None:
        """Warn once about failed evaluation episodes."""
        warning = next((score.warning for score in scores if score.warning), "")
        if warning and not self._warned:
            self._warned = True
            self._run.note(warning)

    def _skip(self, count: int, takes: float) -> None:
        if count <= 0:
            return
        self.skipped, self._taken = self.skipped + count, self._taken + count
        if not self._told:
            self._told = True
            share = f"{self._options.eval_share:.0%} of the time (--eval-share)"
            self._run.note(f"evaluations are skipped: one takes about {takes:.1f} s, and all of them may take {share}")

    # ------------------------------------------------------------------------------------------- the closing evaluation

    def _closing(self) -> Verdict:
        if self._evaluator is None or self._last is None:
            return Verdict()
        (step, final), seed = self._last, closing_seed(self._options.eval_seed)
        chosen = (
            self.candidate if self.candidate is not None and self.candidate.snapshot.version != final.version else None
        )
        weights = [final] if chosen is None else [chosen.snapshot, final]
        allowed = self._closing_seconds()
        fitting = self._evaluator.games(self._length(), allowed) // len(weights)
        episodes = min(self._options.eval_episodes, fitting)
        if episodes < 1:
            why = (
                f"no closing evaluation: an episode of {self._length()} steps does not fit in the {allowed:.1f} s left"
            )
            return Verdict(self.candidate, why=why)
        if episodes < self._options.eval_episodes:
            wanted = self._options.eval_episodes
            self._run.note(f"the closing evaluation plays {episodes} of {wanted} episodes: more would take too long")
        self._begin(self._last, EpisodeRequest(weights, seed, episodes), allowed, alone=True)
        result = None
        while self._running is not None:
            result = self._poll(WAIT)
            if self._running is not None:
                self._run.waiting()
        if result is None or isinstance(result, FreewheelError):
            return Verdict(self.candidate, why=f"no closing evaluation: {result}")
        self._warn(result)
        last = Evaluation(step, final, result[-1])
        best = last if chosen is None else chosen._replace(score=result[0])
        return Verdict(last if last.score.mean > best.score.mean else best, last, fresh=True, seed=seed)

    def _closing_seconds(self) -> float:
        """Return how many seconds the closing evaluation may take."""
        now, minutes = self._run.wall_s(), self._budget.minutes
        unlimited = max(CLOSING, self._options.eval_share * now)
        return unlimited if minutes is None else min(unlimited, max(0.0, (1 + LATE) * 60 * minutes - now))

    def _without_fresh_seeds(self, evaluator: Evaluator) -> Verdict:
        assert self._last is not None, "checked by the caller"
        result = evaluator.poll(0.0)
        if result is None or isinstance(result, FreewheelError):
            return Verdict(self.candidate, why="no episode of the reserved lanes has ended")
        last, best = Evaluation(*self._last, result[0]), self.candidate
        better = best is None or last.score.mean > best.score.mean
        why = "reserved lanes of the one simulation play the newest weights only"
        return Verdict(last if better else best, last, why=why)

    def _length(self) -> int:
        return min(self._run.longest(), self._options.eval_max_steps)

    def _games(self) -> int:
        """Return how many episodes a complete closing evaluation plays."""
        return self._options.eval_episodes * (1 if self.candidate is None else 2)
