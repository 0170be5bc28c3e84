"""Coordination of several learners: when an update begins, when all save, when all end, and the row counts of all.

Every learner runs the same loop over its own collector. All meet before every update (`SeveralLearners.meet`). A learner that
wants to end comes to this barrier too, so that all stop between the same two updates and none waits in an all-reduce.
After every new version the learners exchange their counts, and all end when the totals reach a limit of the budget.

A learner that has to end (a signal, its time limit, a failure) leaves a note and comes to the next exchange. The others
check for this note while they wait for rows. A learner that fails during an update closes its connections.
"""

from __future__ import annotations

import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import numpy as np

from freewheel.core import Learner, RowCounts, Tick
from freewheel.errors import FreewheelError, PeerLostError
from freewheel.ledger import settle, total
from freewheel.metrics.meter import Budget, Meter
from freewheel.run.checkpoints.saver import Saver
from freewheel.run.hooks import Run
from freewheel.run.learners.messages import ASKED, REASONS, Said, Word
from freewheel.run.stopping.ending import exit_code_of
from freewheel.run.stopping.stop import Interrupted, Stop, TimeUp
from freewheel.transport.learners.group import Group

LOOK = 0.1  # seconds between two checks for a note that asks to end
LEAVING = 10.0  # seconds that a learner waits for the others at the end of a run
REPORTS = 15.0  # seconds that the first learner waits for the final reports of the others
COUNTED = ("env_steps", "episodes")
GONE = "another learner is gone"


class EndedTogether(Interrupted):
    """All learners have agreed to end the run."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class LearnerView:
    """The part of a learner's session that the other learners depend on."""

    account: Callable[[], RowCounts]  # counts of all its rows
    learner: Learner
    saver: Saver
    run: Run  # as hooks see it
    note: Callable[[str], None]


class SingleLearner:
    """The coordination of a run with one learner, which decides alone."""

    def attend(self, part: LearnerView) -> None: ...
    def meet(self) -> None: ...
    def taken(self, tick: Tick) -> Tick:
        return tick

    def begin(self, own: Callable[[], str] | None) -> str:
        return "" if own is None else own()

    def why_ended(self, version: int, own: Callable[[], str]) -> str:
        return own()

    def stopped(self, reason: str) -> str:
        return reason

    def saves(self, due: bool) -> bool:
        return due

    def spent(self, own: dict[str, int]) -> dict[str, int]:
        return own

    def rows(self, own: RowCounts) -> RowCounts:
        return own

    def state(self) -> dict[str, Any]:
        return {}

    def told(self, messages: Sequence[str]) -> Sequence[str]:
        return messages

    def leaving(self) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self, rows: RowCounts, report: Mapping[str, Any]) -> tuple[RowCounts, Mapping[str, Any]]:
        return rows, report


class SeveralLearners:
    """This learner's part in the coordination of several learners."""

    def __init__(self, group: Group, stop: Stop, meter: Meter, budget: Budget, earlier: Mapping[str, Any]) -> None:
        """earlier: the `state` of the session that is resumed; empty: none."""
        self._group, self._stop, self._meter, self._budget = group, stop, meter, budget
        self._first = group.rank == 0
        self.gone: Callable[[], bool] = lambda: False  # whether a learner process started here has ended
        self.remedy: Callable[[], str] = lambda: ""  # advice for the user when a learner is gone
        self._agreed = int(earlier.get("agreed", 0))  # exchanges so far, the same number in all learners
        self._others = Counter[str](earlier.get("others", {}))  # work of other learners that the meter has counted
        self._part: LearnerView | None = None
        self._said = [Said(Word(self._agreed)) for _ in range(group.count)]
        self._version = -1
        self._save = self._updating = self._asked = self._over = False
        self._began = time.perf_counter()
        self._limit = math.inf  # monotonic time until which this learner waits for the others
        self._played: list[tuple[float, float]] = []
        self._notes = self._contexts = 0
        self._shown = [0] * group.count  # messages of each learner that were shown

    def attend(self, part: LearnerView) -> None:
        self._part, self._version = part, part.learner.version
        self._stop.look, self._stop.look_due = self._look, 0.0

    # ------------------------------------------------------------------------------------------------------------- the loop

    def begin(self, own: Callable[[], str] | None) -> str:
        """Exchange counts before the first turn of the loop. Return why the run ends; empty: it does not."""
        return self._count("" if own is None else own(), told=own is not None)

    def meet(self) -> None:
        """Wait before an update until all learners are here, or end with all of them."""
        with self._meter.span("wait-data"):
            self._end_if_asked(self._exchange(self._word()))
        self._updating = True

    def taken(self, tick: Tick) -> Tick:
        """Take note of a turn of the loop. In the first learner, env_steps becomes the count of all learners."""
        self._updating = False
        self._played += [(one.ret, one.length) for chunk in tick.chunks for one in chunk.episodes]
        return replace(tick, env_steps=self._meter.done["env_steps"]) if self._first else tick

    def why_ended(self, version: int, own: Callable[[], str]) -> str:
        """Exchange counts after a turn with a new version. Return why the run ends; empty: it does not."""
        if version == self._version:
            return ""
        self._version = version
        return self._count(own())

    def stopped(self, reason: str) -> str:
        """Return an empty text: a hook's wish to stop is exchanged after the next version."""
        return ""

    def _count(self, wish: str, *, told: bool = True) -> str:
        with self._meter.span("wait-data"):
            said = self._exchange(self._full_word(wish))
        self._take(said)
        self._end_if_asked(said, wish)
        spent = self.spent({}).items() if told else ()
        over = (name for name, used in spent if (limit := getattr(self._budget, name)) and used >= limit)
        reason = next(over, "")
        self._over = self._over or bool(reason)
        return reason

    def spent(self, own: dict[str, int]) -> dict[str, int]:
        """Return the finished rows and the episodes of all learners at the last exchange."""
        return {
            "steps": sum(one.rows.done for one in self._said),
            "episodes": sum(one.word.episodes for one in self._said),
        }

    def saves(self, due: bool) -> bool:
        """Return whether all learners save now."""
        save, self._save = self._save, False
        return save

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        known = {"count": self._group.count, "rank": self._group.rank, "agreed": self._agreed}
        done = self._own_part.learner.rows().done + sum(one.rows.done for one in self._said[1:])
        return {"learners": {**known, "others": dict(self._others)}, "done": done}

    def _word(self, reason: str = "") -> Said:
        asked = self._stop.signal
        known = reason if reason in REASONS else "stopped"
        return Said(Word(self._agreed + 1, REASONS.index(known), 0 if asked is None else int(asked)))

    def _full_word(self, wish: str) -> Said:
        part = self._own_part
        rows, saver = part.account(), part.saver
        rate, contexts = part.run._assigned() if self._first else (None, None)
        if contexts is not None:
            self._contexts += 1
            self._group.note(f"contexts/{self._contexts}", contexts.tolist())
        word = self._word(wish).word._replace(
            save=saver.due,
            busy=saver.under_way is not None,
            learning_rate=np.nan if rate is None else rate,
            contexts=self._contexts,
            notes=self._notes,
            waited_s=self._group.waited_s,
            **self._own_done(),
        )
        played, self._played = self._played, []
        return Said.of(rows, word, played)

    @property
    def _own_part(self) -> LearnerView:
        assert self._part is not None, "the session attends before its loop begins"
        return self._part

    def _own_done(self) -> dict[str, int]:
        """Return this learner's counts. The first learner's meter also contains the counts of the others."""
        return {name: self._meter.done[name] - self._others[name] for name in COUNTED}

    def _exchange(self, said: Said) -> list[Said]:
        """Exchange messages with all learners, and return all of them by rank."""
        words = [Said.unpack(one) for one in self._group.agree(said.pack(), self._meanwhile)]
        self._agreed += 1
        if any(one.word.number != self._agreed for one in words):
            numbers = ", ".join(str(one.word.number) for one in words)
            raise FreewheelError(f"the learners are not at the same exchange ({numbers}): please report this")
        return words

    def _meanwhile(self) -> None:
        """Runs repeatedly while this learner waits for others, which may be waiting for their environments."""
        self._stop.report()
        now = time.monotonic()
        if self.gone():
            raise PeerLostError(self._group.why() or GONE)
        if (self._stop.signal is not None or now > self._stop.time_up) and not self._asked:
            self._ask("interrupted" if self._stop.signal is not None else "minutes")
        if now > self._limit:
            raise PeerLostError(f"a learner did not reach the end of the run within {LEAVING:g} s")

    def _ask(self, reason: str, **about: Any) -> None:
        """Ask all others to come to the next exchange and end the run."""
        self._asked, self._limit = True, time.monotonic() + LEAVING
        self._group.end({"rank": self._group.rank, "reason": reason, **about})

    def _look(self) -> None:
        """Runs while this learner waits for rows: raises if another learner wants to end or is gone."""
        now = time.monotonic()
        self._stop.look_due = now + LOOK
        if self._updating or self._over:
            return
        if self.gone():
            raise PeerLostError(self._group.why() or GONE)
        if not self._asked and self._group.ending is not None:
            self._asked, self._limit = True, now + LEAVING
            raise EndedTogether(ASKED)

    def _take(self, said: list[Said]) -> None:
        """Process the messages of all. The first learner counts the others' work and shows their notes. The others
        take over the values that the first learner's hooks have assigned."""
        before, self._said = self._said, said
        self._save = said[0].word.save and not any(one.word.busy for one in said)
        if self._first:
            self._add_others({name: sum(getattr(one.word, name) for one in said[1:]) for name in COUNTED}, said[1:])
            for rank in range(1, self._group.count):
                self._show_notes(rank, said[rank].word.notes)
            return
        first, run, learner = said[0].word, self._own_part.run, self._own_part.learner
        if first.contexts != before[0].word.contexts:
            run.contexts = self._group.noted(f"contexts/{first.contexts}", LEAVING)
        if not np.isnan(first.learning_rate) and not np.isnan(learner.learning_rate):
            learner.learning_rate = first.learning_rate

    def _add_others(self, done: Mapping[str, int], said: Sequence[Said] = ()) -> None:
        """Count the total work of all learners but the first in the meter."""
        new = {name: done[name] - self._others[name] for name in COUNTED}
        self._meter.add(new["env_steps"], new["episodes"], [pair for one in said for pair in one.played])
        self._others.update(new)

    def _show_notes(self, rank: int, count: int) -> None:
        while self._shown[rank] < count:
            self._shown[rank] += 1
            text = self._group.noted(f"notes/{rank}/{self._shown[rank]}", LEAVING)
            self._own_part.note(f"learner {rank}: {text}")

    def told(self, messages: Sequence[str]) -> Sequence[str]:
        """Return the collector's messages. The others also send theirs to the first learner, which shows all."""
        with suppress(PeerLostError):
            for text in () if self._first else messages:
                self._notes += 1
                self._group.note(f"notes/{self._group.rank}/{self._notes}", text)
        return messages

    # -------------------------------------------------------------------------------------------------------------- the end

    def _end_if_asked(self, said: Sequence[Said], wish: str = "") -> None:
        """Raise the reason for the end if one of the learners wants to end."""
        if not any(one.word.stop for one in said):
            return
        self._asked = self._over = True
        wanted = [one.word for one in said if REASONS[one.word.stop] not in ("", ASKED)]
        word = max(wanted, key=lambda one: one.stop, default=Word(self._agreed, REASONS.index("stopped")))
        reason = REASONS[word.stop]
        if reason == "interrupted":
            self._stop.signal = self._stop.signal or signal.Signals(word.signal or signal.SIGINT)
            raise Interrupted
        if reason == "failed":
            self._tell_failure(self._group.ending or {})
        raise EndedTogether(wish or reason)

    def _tell_failure(self, ending: Mapping[str, Any]) -> NoReturn:
        """Report another learner's failure. Only the first learner raises it; the others end silently."""
        if self._first and ending.get("rank", 0) != 0:
            raise failure_of(ending)
        raise EndedTogether("failed")

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """End all learners when an exception ends this block, between the same two updates if possible."""
        try:
            yield
        except BaseException as error:
            if self._over:
                raise
            self._over = True
            if isinstance(error, PeerLostError):
                self._lose(error)
            self._leave(error)
            raise

    def _leave(self, error: BaseException) -> None:
        reason = "failed"
        if isinstance(error, Interrupted):
            reason = "minutes" if isinstance(error, TimeUp) else "interrupted"
        if isinstance(error, EndedTogether):
            reason = error.reason
        try:
            if reason == "failed":
                self._ask(reason, text=str(error) or repr(error), exit_code=exit_code_of(error))
            elif reason != ASKED:
                self._ask(reason)
            if self._updating:  # the others are in this update: they lose the connection and read the note
                self._group.close()
                return
            said = self._exchange(self._word(reason))
        except PeerLostError as lost:
            if reason == ASKED:
                self._lose(lost)
            return
        if reason != "failed":
            self._end_if_asked(said)

    def _lose(self, lost: PeerLostError) -> NoReturn:
        """Handle a lost learner: raise the failure that it has reported, or PeerLostError if it reported none."""
        ending: Mapping[str, Any] | None = None
        with suppress(PeerLostError):
            ending = self._group.ending
        self._group.close()
        if ending is not None and ending["rank"] != self._group.rank:
            if ending["reason"] == "interrupted":
                raise Interrupted from None
            self._tell_failure(ending)
        if not self._first:
            raise EndedTogether("failed") from None
        raise PeerLostError(f"{lost}: the others cannot continue without it; {self.remedy()}") from None

    def rows(self, own: RowCounts) -> RowCounts:
        """Return row counts: for the first learner of all (the others' as of the last exchange), else its own."""
        return total(own, *(one.rows for one in self._said[1:])) if self._first else own

    def finish(self, rows: RowCounts, report: Mapping[str, Any]) -> tuple[RowCounts, Mapping[str, Any]]:
        """Leave this learner's final report. The first learner returns the totals of all, for the summary."""
        share = self._group.waited_s / max(time.perf_counter() - self._began, 1e-9)
        about = {"rows": asdict(rows), "report": _counts(report), "wait_share": share}
        own: Mapping[str, Any] = {**about, **self._own_done()}
        if not self._first:
            with suppress(PeerLostError):
                self._group.note(f"last/{self._group.rank}", {**own, "notes": self._notes})
            return rows, report
        until, accounts = time.monotonic() + REPORTS, [own]
        accounts += [self._last_of(rank, until) for rank in range(1, self._group.count)]
        self._add_others({name: sum(one[name] for one in accounts[1:]) for name in COUNTED})
        counted = [RowCounts(**one["rows"]) for one in accounts]
        self._said[1:] = [Said.of(rows) for rows in counted[1:]]
        summed = sum((Counter(one["report"]) for one in accounts), Counter[str]())
        learners = [
            {
                "rank": rank,
                "env_steps": one["env_steps"],
                "trained": one["rows"]["trained"],
                "wait_share": one["wait_share"],
            }
            for rank, one in enumerate(accounts)
        ]
        return total(*counted), {**report, **{name: summed[name] for name in _counts(report)}, "learners": learners}

    def _last_of(self, rank: int, until: float) -> Mapping[str, Any]:
        """Return another learner's final report; without one, the counts of its last message."""
        said = self._said[rank]
        with suppress(PeerLostError):
            found = self._group.noted(f"last/{rank}", 0.0 if self.gone() else until - time.monotonic())
            if found is not None:
                self._show_notes(rank, found["notes"])
                return found  # type: ignore[no-any-return]
        known = {name: getattr(said.word, name) for name in COUNTED}
        return {**known, "rows": asdict(settle(said.rows)), "report": {}, "wait_share": None}


def failure_of(ending: Mapping[str, Any]) -> FreewheelError:
    """Return the error that another learner has reported."""
    error = FreewheelError(f"learner {ending['rank']}: {ending.get('text', 'failed')}")
    error.exit_code = int(ending.get("exit_code", error.exit_code))
    return error


def _counts(report: Mapping[str, Any]) -> dict[str, int]:
    """Return the integer counts of a collector's report."""
    return {name: value for name, value in report.items() if isinstance(value, int) and not isinstance(value, bool)}
