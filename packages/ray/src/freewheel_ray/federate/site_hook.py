"""The hook by which a site takes part in rounds: before a version is published it hands over what was learned and waits for the
average, which takes its place. All else stays at the site."""

from __future__ import annotations

import math
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic

from freewheel.core import Episode, NDArray
from freewheel.errors import FileError, FreewheelError, SetupError
from freewheel.run.hooks import Hook, Run
from freewheel_ray.federate.average import round_of
from freewheel_ray.federate.message import SiteMessage, unpack

LOOK = 0.1  # seconds between two looks at the line
ENDED, GONE = "the federation has ended", "the coordinator is gone"


@dataclass(frozen=True)
class SiteSetup:
    """What a site is told when it starts."""

    words: tuple[str, ...]  # of its command line
    trust: bool  # of `train --trust`, given by whoever started the federation
    round_steps: int
    returns: bool  # whether it may report the mean return of its episodes
    patience: float  # seconds without a word from the coordinator after which it ends


class SiteHook(Hook):
    """One site's part in a federation."""

    def __init__(self, line: Connection, order: SiteSetup) -> None:
        self._line, self._order = line, order
        self._round = self._rows = 0  # the present round, and rows trained before it
        self._first = self._rounds = 0  # rows that an earlier session of the site had done, rounds since then
        self._base: dict[str, NDArray] = {}  # that this round has begun with
        self._returns: list[float] = []  # of episodes of this round

    def on_start(self, run: Run) -> None:
        self._first = run.rows.done
        try:
            self._base = run.learned
        except ValueError as error:
            raise SetupError(str(error)) from None
        self._line.send_bytes(SiteMessage("ready", {"spaces": dict(run.spaces)}, self._base).pack())
        self._take_average(run)

    def on_episode(self, run: Run, episode: Episode) -> None:
        if self._order.returns:
            self._returns.append(episode.ret)

    def on_publish(self, run: Run) -> None:
        if run.stopping or run.rows.done - self._first < (self._rounds + 1) * self._order.round_steps:
            return
        self._rounds += 1
        values: dict[str, float] = {"round": self._round, "rows": run.rows.trained - self._rows}
        if self._returns:
            values |= {"return": math.fsum(self._returns) / len(self._returns), "episodes": len(self._returns)}
        try:
            self._line.send_bytes(SiteMessage("learned", values, round_of(run.learned, self._base)).pack())
        except OSError:
            run.stop(GONE)
            return
        run.log("federation/rows", values["rows"])
        self._take_average(run)

    def _take_average(self, run: Run) -> None:
        """Wait for the next round, and begin it; or end."""
        began = monotonic()
        while not self._line.poll(LOOK):
            run.check()
            if monotonic() - began > self._order.patience:
                run.stop(f"{GONE}: nothing was heard of it for {self._order.patience:.0f} s")
                return
        try:
            frame = unpack(self._line.recv_bytes(), "the coordinator", "round", "end", known=self._base)
        except (EOFError, OSError):
            run.stop(GONE)
            return
        except FileError as error:
            raise FreewheelError(str(error)) from None
        run.log("federation/wait_s", monotonic() - began)
        if frame.arrays:
            self._base = dict(frame.arrays)
            run.learned = frame.arrays
        self._rows, self._returns = run.rows.trained, []
        if frame.kind == "end":
            run.stop(ENDED)
            return
        number = frame.values.get("round")
        if type(number) is not int:
            raise FreewheelError("the coordinator has sent no round")
        self._round = number
        run.log("federation/round", number)
