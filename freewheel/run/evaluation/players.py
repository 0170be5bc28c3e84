"""Who plays evaluation episodes during a run: this process, processes side by side, or reserved lanes of the one simulation."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from time import monotonic
from typing import NamedTuple, Protocol

import numpy as np
from typing_extensions import override

from freewheel.core import Actor, Collector, Env, EnvSpec, Episode, Snapshot
from freewheel.errors import EnvError, FreewheelError
from freewheel.files.memory import free_memory
from freewheel.rollout.factory import MakeActor, WorkerSpec
from freewheel.rollout.probe import usable_cores
from freewheel.run.evaluation.episodes import Call, EpisodeResult, Score, play_round, scored
from freewheel.seeding import evaluation_episodes
from freewheel.transport.executors import ProcessExecutor, wait_for_any
from freewheel.transport.workers.place import At

MOST = 64  # processes that play side by side
WAITS = 0.5  # an environment that computes for a smaller part of its time than this waits
MEMORY = 200_000_000  # bytes that a process may need where the environment's own need is not known
NICE = 5  # a lower priority than that of training, not so low that an evaluation would never end beside busy workers
START = 5.0  # seconds beyond the time-out of a constructor: the start of a process
ACT = 1e-4  # seconds of a step for the policy and for us
SHARE_OF_MEMORY = 0.5  # of what is free


class Cost(NamedTuple):
    """What one environment costs, as far as it matters here."""

    step: float = 0.0  # seconds; 0: not known
    duty: float = 1.0  # the part of them in which it computes
    memory: int = MEMORY  # bytes of a process that has one

    @property
    def waits(self) -> bool:
        return self.duty < WAITS


class EpisodeRequest(NamedTuple):
    """Weights to score, all on the same episodes."""

    weights: Sequence[Snapshot]
    seed: int
    episodes: int


class EpisodeShare(NamedTuple):
    """Consecutive episodes for one player, a lane each."""

    snapshot: Snapshot | None  # None: the same weights as before
    seed: int
    first: int
    wanted: int


class SlowCall(NamedTuple):
    """The call of an environment that has taken longest among those under way."""

    what: str
    seconds: float
    limit: float  # seconds that it may take


class Evaluator(Protocol):
    """Carries out one order at a time."""

    @property
    def in_turn(self) -> bool: ...  # training has to wait meanwhile
    @property
    def replays(self) -> bool: ...  # it can play any weights on any seeds, after training too
    @property
    def progress(self) -> tuple[int, int]: ...  # episodes of the order that have ended, and all of them
    def slowest(self) -> SlowCall | None: ...  # in a process of its own; for any thread
    def start(self, order: EpisodeRequest, *, alone: bool) -> None: ...  # alone: training has ended and needs no cores
    def poll(self, wait: float) -> Sequence[Score] | FreewheelError | None: ...  # by weights; None: not yet
    def cancel(self) -> None: ...
    def seconds(self, length: int, games: int, *, alone: bool) -> float: ...  # that so many episodes take, about
    def games(self, length: int, seconds: float) -> int: ...  # episodes that fit in so many seconds when it is alone


class Player(Protocol):
    """Plays one part at a time."""

    def begin(self, part: EpisodeShare) -> None: ...
    def poll(self, wait: float) -> list[EpisodeResult] | FreewheelError | None: ...  # None: not yet
    def stop(self) -> None: ...


class Rounds:
    """Plays parts in one environment; a function for an executor."""

    def __init__(self, make: Callable[[], Env], actor: MakeActor, limit: int) -> None:
        self._env: Env = make()
        self._actor: Actor = actor()
        self._limit = limit

    def __call__(self, part: EpisodeShare) -> Generator[Call, None, list[EpisodeResult]]:
        if part.snapshot is not None:
            self._actor.load(part.snapshot)
            self._env.set_context(part.snapshot.context)
        return play_round(self._env, self._actor, (part.seed, part.first), part.wanted, self._limit)

    def close(self) -> None:
        self._env.close()


class InlinePlayer:
    """Plays in this process, while it is polled. Its environment is excluded from garbage collection, as in workers."""

    def __init__(self, build: Callable[[], Rounds]) -> None:
        self._build = build
        self._rounds: Rounds | None = None
        self._playing: Generator[Call, None, list[EpisodeResult]] | None = None

    def begin(self, part: EpisodeShare) -> None:
        if self._rounds is None or not gc.get_freeze_count():  # the collector's end includes everything again
            self._rounds = self._rounds or self._build()
            gc.freeze()
        self._playing = self._rounds(part)

    def poll(self, wait: float) -> list[EpisodeResult] | FreewheelError | None:
        assert self._playing is not None, "begin first"
        until = monotonic() + wait
        try:
            next(self._playing)
            while monotonic() < until:
                next(self._playing)
        except StopIteration as end:
            played: list[EpisodeResult] = end.value
            return played
        return None

    def stop(self) -> None:
        self._playing = None

    def close(self) -> None:
        if self._rounds is not None:
            gc.unfreeze()
            self._rounds.close()


class ProcessPlayer:
    """Plays in a process of its own, which is killed when a call of the environment takes too long."""

    def __init__(self, build: Callable[[], Rounds], how: WorkerSpec, name: str) -> None:
        self.executor = ProcessExecutor[EpisodeShare, list[EpisodeResult]](
            build, "evaluation", nice=NICE, modules=how.modules
        )
        self._limits, self._name = how.timeouts, name
        self._loaded: Snapshot | None = None  # by the process; None: it has not been started
        self._seed = 0

    def begin(self, part: EpisodeShare) -> None:
        self._seed = part.seed
        self.executor.place("constructor" if self._loaded is None else "reset", part.first, 0)
        self.executor.submit(part._replace(snapshot=None) if part.snapshot is self._loaded else part)
        self._loaded = part.snapshot

    def call(self) -> SlowCall:
        """The present call of its environment. For any thread."""
        at = self.executor.place.read()
        return SlowCall(at.called(self._seed_of(at.episode)), at.age, self._limit(at))

    def _seed_of(self, episode: int) -> int:
        return evaluation_episodes(self._seed, episode, 1).seed(0)

    def _limit(self, at: At) -> float:
        return at.limit(self._limits) + (START if at.phase == "constructor" else 0.0)

    def poll(self, wait: float) -> list[EpisodeResult] | FreewheelError | None:
        result = self.executor.result(wait)
        if result is None:
            at = self.executor.place.read()
            if at.age > self._limit(at):
                seed = self._seed_of(at.episode)
                result = EnvError(f"{self._name} {at.overdue(self._limits, seed)}")
        if isinstance(result, FreewheelError):
            self.stop()
        return result

    def stop(self) -> None:
        self.executor.stop()
        self._loaded = None


class Players:
    """Hands the episodes of an order out to players, part by part, so that one long episode keeps only its own player busy.

    Implements Evaluator.
    """

    replays = True

    def __init__(self, make: Callable[[], Player], spec: EnvSpec, lanes: int, cost: Cost, *, in_turn: bool) -> None:
        self._make, self._spec, self._lanes, self._cost, self.in_turn = make, spec, lanes, cost, in_turn
        self._crew: list[Player] = []
        self._order: EpisodeRequest | None = None
        self._parts: deque[tuple[int, int]] = deque()  # (which weights, first episode), not yet handed out
        self._busy: dict[Player, tuple[int, int]] = {}
        self._played: list[dict[int, EpisodeResult]] = []  # by weights: episodes by number
        self._size = 0  # players that take part

    @property
    def progress(self) -> tuple[int, int]:
        wanted = 0 if self._order is None else len(self._order.weights) * self._order.episodes
        return sum(map(len, self._played)), wanted

    def slowest(self) -> SlowCall | None:
        return None

    def start(self, order: EpisodeRequest, *, alone: bool) -> None:
        firsts = range(0, order.episodes, self._lanes)
        self._order, self._played = order, [{} for _ in order.weights]
        self._parts = deque((which, first) for first in firsts for which in range(len(order.weights)))
        self._size = self.most(len(self._parts), alone=alone)
        self._crew += [self._make() for _ in range(self._size - len(self._crew))]

    def poll(self, wait: float) -> Sequence[Score] | FreewheelError | None:
        order, until = self._order, monotonic() + wait
        assert order is not None, "start first"
        try:
            self._hand_out(order)
            while self._busy:
                self._collect(max(0.0, until - monotonic()))
                self._hand_out(order)
                if self._busy and monotonic() >= until:
                    return None
            scores = [self._score(order, which) for which in range(len(order.weights))]
        except FreewheelError as error:
            self.cancel()
            return error
        self._order = None
        return scores

    def cancel(self) -> None:
        for player in self._busy:
            player.stop()
        self._busy, self._order = {}, None
        self._parts.clear()

    def most(self, parts: int, *, alone: bool) -> int:
        """How many players take part."""
        return min(parts, 1)

    def seconds(self, length: int, games: int, *, alone: bool) -> float:
        parts = -(-games // self._lanes)
        return self._round(length) * -(-parts // self.most(parts, alone=alone))

    def games(self, length: int, seconds: float) -> int:
        return int(seconds / self._round(length)) * self.most(MOST, alone=True) * self._lanes

    def _round(self, length: int) -> float:
        """Seconds of one part with an episode of this length; lanes of one process are stepped one after the other."""
        return max(1, length) * (self._cost.step + ACT) * self._lanes

    def _hand_out(self, order: EpisodeRequest) -> None:
        for player in self._crew[: self._size]:
            if self._parts and player not in self._busy:
                which, first = self._parts.popleft()
                wanted = min(self._lanes, order.episodes - first)
                player.begin(EpisodeShare(order.weights[which], order.seed, first, wanted))
                self._busy[player] = which, first

    def _collect(self, wait: float) -> None:
        """Take what players have played, after a wait if there is only one of them."""
        for player in list(self._busy):
            result = player.poll(wait if len(self._busy) == 1 else 0.0)
            if isinstance(result, FreewheelError):
                raise result
            if result is not None:
                which, first = self._busy.pop(player)
                self._played[which].update(enumerate(result, first))

    def _score(self, order: EpisodeRequest, which: int) -> Score:
        played = self._played[which]
        in_order = [played[number] for number in range(order.episodes)]
        return scored(in_order, self._spec, order.seed, order.weights[which].context)


class ProcessPlayers(Players):
    """A player in each process: as many as there are episodes where environments wait, no more than cores where they compute."""

    def __init__(
        self, make: Callable[[], ProcessPlayer], spec: EnvSpec, lanes: int, cost: Cost, *, in_turn: bool, busy: int = 0
    ) -> None:
        """`busy`: cores that training uses, so far as there are any."""
        super().__init__(make, spec, lanes, cost, in_turn=in_turn)
        self._cores_in_use, self._room = 0 if in_turn else busy, self._fitting()

    @override
    def start(self, order: EpisodeRequest, *, alone: bool) -> None:
        self._room = self._fitting()
        super().start(order, alone=alone)

    def _fitting(self) -> int:
        """Processes that the memory has room for; those that run have theirs already."""
        free = free_memory() * SHARE_OF_MEMORY
        return len(self._crew) + int(free / self._cost.memory)

    @override
    def slowest(self) -> SlowCall | None:
        calls = [player.call() for player in list(self._busy) if isinstance(player, ProcessPlayer)]
        return max(calls, key=lambda call: call.seconds, default=None)

    @override
    def most(self, parts: int, *, alone: bool) -> int:
        cores = usable_cores() if alone else max(1, usable_cores() - self._cores_in_use)
        useful = min(MOST, round(usable_cores() / max(self._cost.duty, 1 / MOST))) if self._cost.waits else cores
        return max(1, min(parts, useful, self._room))

    @override
    def _collect(self, wait: float) -> None:
        wait_for_any([player.executor for player in self._busy if isinstance(player, ProcessPlayer)], wait)
        super()._collect(0.0)

    def close(self) -> None:
        self.cancel()
        executors = [player.executor for player in self._crew if isinstance(player, ProcessPlayer)]
        for executor in executors:
            executor.hang_up()
        with ExitStack() as stack:
            for executor in executors:
                stack.enter_context(executor)


class ReservedLanes:
    """Scores the latest episodes of reserved lanes, whose weights may be a little older than those of the order.

    Implements Evaluator, as far as a simulation that goes on training can: it plays the newest weights only, on seeds of its own.
    """

    in_turn = replays = False

    def __init__(self, collector: Collector, episodes: int, measures: Sequence[str]) -> None:
        self._collector, self._measures = collector, measures
        self._latest: deque[Episode] = deque(maxlen=episodes)

    @property
    def progress(self) -> tuple[int, int]:
        return len(self._latest), self._latest.maxlen or 0

    def slowest(self) -> SlowCall | None:
        return None

    def start(self, order: EpisodeRequest, *, alone: bool) -> None: ...

    def poll(self, wait: float) -> Sequence[Score] | None:
        """What is ordered before the first episode has ended is scored when one has."""
        self._latest.extend(self._collector.eval_episodes() or ())
        if not self._latest:
            return None
        means = np.mean([episode.measures for episode in self._latest], axis=0).tolist()
        returns, lengths = zip(*((one.ret, one.length) for one in self._latest), strict=True)
        return [Score(returns, lengths, measures=dict(zip(self._measures, means, strict=True)))]

    def cancel(self) -> None: ...

    def seconds(self, length: int, games: int, *, alone: bool) -> float:
        return 0.0

    def games(self, length: int, seconds: float) -> int:
        return self._latest.maxlen or 0
