"""The learners of a run, which the first learner or torchrun starts, and the view that each has of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from freewheel.errors import PeerLostError
from freewheel.learn.spec import ALONE, Peers
from freewheel.metrics.meter import Budget, Meter
from freewheel.run.checkpoints.run_progress import Earlier
from freewheel.run.learners.coordination import SeveralLearners, SingleLearner
from freewheel.run.learners.share import share_of
from freewheel.run.learners.versions import CHOSEN, remedy
from freewheel.run.plan import Plan
from freewheel.run.stopping.ending import exit_code_of
from freewheel.run.stopping.stop import Stop
from freewheel.transport.forkserver import pickled
from freewheel.transport.learners.group import JOIN, Group
from freewheel.transport.learners.launch import Learners
from freewheel.transport.learners.rank import RankInfo, of_torchrun, send

PATH = "run"  # the note with the run directory, left when the directory exists
ONLY = RankInfo(0, 1, 0, 1)


@dataclass(frozen=True)
class LearnerProcesses:
    """This learner among all learners of a run; without a group it is the only one."""

    place: RankInfo = ONLY
    group: Group | None = None
    gone: Callable[[], bool] = lambda: False  # whether a learner that was started here has ended

    @property
    def peers(self) -> Peers:
        return ALONE if self.group is None else self.group

    def part(self, whole: Plan) -> Plan:
        """Return this learner's share of a plan."""
        return whole if self.group is None else share_of(whole, self.place)

    def begins_in(self, path: Path, earlier: Earlier | None) -> None:
        """Announce to all other learners that the run directory exists, and which exchange the run resumes from."""
        if self.group is not None and self.place.rank == 0:
            if earlier is not None:
                self.group.note(CHOSEN, earlier.progress["learners"]["agreed"])
            self.group.note(PATH, str(path.absolute()))

    def together(
        self, stop: Stop, meter: Meter, budget: Budget, path: Path, before: Mapping[str, Any]
    ) -> SingleLearner | SeveralLearners:
        """Return the coordination of this learner with the others. before: progress.json of the resumed session."""
        if self.group is None:
            return SingleLearner()
        together = SeveralLearners(self.group, stop, meter, budget, before.get("learners", {}))
        together.gone, together.remedy = self.gone, partial(remedy, path, self.place.count)
        return together


@contextmanager
def gathered(whole: Plan, stop: Stop, *, resumed: bool) -> Iterator[LearnerProcesses]:
    """Yield the first learner's view of all learners of a run. They end with this block."""
    learners, place = whole.config.run.machine.learners, of_torchrun()
    if learners == 1:
        yield LearnerProcesses()
        return
    message = pickled((whole, resumed), f"{whole.config.env.label} with its options")
    if place is not None:
        store = place.meet(JOIN)
        send(store, message)
        group = Group(place, store)
        with told_failures(group):
            yield LearnerProcesses(place, group)
        return
    from freewheel.run.learners.follow import main

    with Learners(learners, main, message) as started, told_failures(started.group):
        stop.leftovers.kept = started.pids
        yield LearnerProcesses(RankInfo(0, learners, 0, learners), started.group, started.gone)


@contextmanager
def told_failures(group: Group) -> Iterator[None]:
    """Report an error in this block to the other learners, and close the group at the end."""
    try:
        yield
    except BaseException as error:
        with suppress(PeerLostError):
            about = {"text": str(error) or repr(error), "exit_code": exit_code_of(error)}
            group.end({"rank": group.rank, "reason": "failed", **about})
        raise
    finally:
        group.close()


def wait_for_path(group: Group) -> Path | None:
    """Wait until the first learner has made the run directory, and return it; None: the run has ended before."""
    while (path := group.noted(PATH, 0.5)) is None:
        if group.ending is not None:
            return None
    return Path(path)
