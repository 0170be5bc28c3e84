"""The hook with which a site takes part in rounds. Before a version is published, it sends the learned weights to the coordinator
and waits for the average, which replaces them. Everything else stays at the site."""

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

LOOK = 0.1  # seconds between two checks of the connection
ENDED = "the federation has ended"
GONE = "the coordinator is gone"


@dataclass(frozen=True)
class SiteSetup:
    """The settings that a site receives when it starts."""

    words: tuple[str, ...]  # its command line
    trust: bool  # whether the federation was started with `train --trust`
    round_steps: int
    returns: bool  # whether it may report the mean return of its episodes
    patience: float  # the site ends after this many seconds without a message from the coordinator


class SiteHook(Hook):
    """Lets one site take part in a federation."""

    def __init__(self, line: Connection, order: SiteSetup) -> None:
        self._line = line
        self._order = order
        self._round = 0  # the present round
        self._rows = 0  # rows trained before the present round
        self._first = 0  # rows that earlier sessions of the site have done
        self._rounds = 0  # rounds of this session
        self._base: dict[str, NDArray] = {}  # the average at the start of this round
        self._returns: list[float] = []  # returns of the episodes in this round

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
        """Wait for the next round and begin it, or stop the run."""
        began = monotonic()
        while not self._line.poll(LOOK):
            run.check()
            if monotonic() - began > self._order.patience:
                run.stop(f"{GONE}: it sent nothing for {self._order.patience:.0f} s")
                return
        try:
            message = unpack(self._line.recv_bytes(), "the coordinator", "round", "end", known=self._base)
        except (EOFError, OSError):
            run.stop(GONE)
            return
        except FileError as error:
            raise FreewheelError(str(error)) from None
        run.log("federation/wait_s", monotonic() - began)
        if message.arrays:
            self._base = dict(message.arrays)
            run.learned = message.arrays
        self._rows = run.rows.trained
        self._returns = []
        if message.kind == "end":
            run.stop(ENDED)
            return
        number = message.values.get("round")
        if type(number) is not int:
            raise FreewheelError("the coordinator sent no round number")
        self._round = number
        run.log("federation/round", number)
