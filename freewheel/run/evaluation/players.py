"""Players of evaluation episodes: this process, parallel processes, or reserved lanes of the only simulation."""

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
from freewheel.transport.workers.call_tracker import At

MOST = 64  # processes that play at the same time, at most
WAITS = 0.5  # an environment that computes for a smaller share of a step mostly waits
MEMORY = 200_000_000  # bytes of a process if the need of its environment is not known
NICE = 5  # lower priority than training, but high enough for an evaluation to end while workers are busy
START = 5.0  # seconds that the start of a process adds to the timeout of a constructor
ACT = 1e-4  # seconds per step for the policy and for this module
SHARE_OF_MEMORY = 0.5  # share of the free memory that players may use


class Cost(NamedTuple):
    """The cost of one environment."""

    step: float = 0.0  # seconds per step; 0: not known
    duty: float = 1.0  # the share of a step in which it computes
    memory: int = MEMORY  # bytes of a process that holds one

    @property
    def waits(self) -> bool:
        return self.duty < WAITS


class EpisodeRequest(NamedTuple):
    """Weights to score, all on the same episodes."""

    weights: Sequence[Snapshot]
    seed: int
    episodes: int


class EpisodeShare(NamedTuple):
    """Consecutive episodes for one player, one per lane."""

    snapshot: Snapshot | None  # None: the same weights as before
    seed: int
    first: int
    wanted: int


class SlowCall(NamedTuple):
    """The pending environment call that has taken longest so far."""

    what: str
    seconds: float
    limit: float  # seconds that it may take


class Evaluator(Protocol):
    """Serves one EpisodeRequest at a time."""

    @property
    def in_turn(self) -> bool: ...  # training waits while it plays
    @property
    def replays(self) -> bool: ...  # it can play any weights on any seeds, also after training
    @property
    def progress(self) -> tuple[int, int]: ...  # (ended, requested) episodes
    def slowest(self) -> SlowCall | None: ...  # None: no pending call in another process; any thread may call
    def start(self, order: EpisodeRequest, *, alone: bool) -> None: ...  # alone: training has ended and needs no cores
    def poll(self, wait: float) -> Sequence[Score] | FreewheelError | None: ...  # one per weights; None: not yet
    def cancel(self) -> None: ...
    def seconds(self, length: int, games: int, *, alone: bool) -> float: ...  # estimated time of `games` episodes
    def games(self, length: int, seconds: float) -> int: ...  # episodes that fit in `seconds` if it is alone


class Player(Protocol):
    """Plays one EpisodeShare at a time."""

    def begin(self, part: EpisodeShare) -> None: ...
    def poll(self, wait: float) -> list[EpisodeResult] | FreewheelError | None: ...  # None: not yet
    def stop(self) -> None: ...


class Rounds:
    """Plays episode shares in one environment; an executor calls it."""

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
        if self._rounds is None or not gc.get_freeze_count():  # closing the collector unfreezes all objects
            self._rounds = self._rounds or self._build()
            gc.freeze()
        self._playing = self._rounds(part)

    def poll(self, wait: float) -> list[EpisodeResult] | FreewheelError | None:
        assert self._playing is not None, "call begin() first"
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
    """Plays in a separate process, which is killed if a call of the environment takes too long."""

    def __init__(self, build: Callable[[], Rounds], how: WorkerSpec, name: str) -> None:
        self.executor = ProcessExecutor[EpisodeShare, list[EpisodeResult]](
            build, "evaluation", nice=NICE, modules=how.modules
        )
        self._limits, self._name = how.timeouts, name
        self._loaded: Snapshot | None = None  # what the process has loaded; None: it is not running
        self._seed = 0

    def begin(self, part: EpisodeShare) -> None:
        self._seed = part.seed
        self.executor.place("constructor" if self._loaded is None else "reset", part.first, 0)
        self.executor.submit(part._replace(snapshot=None) if part.snapshot is self._loaded else part)
        self._loaded = part.snapshot

    def call(self) -> SlowCall:
        """Return the current call of its environment. Any thread may call this."""
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
    """Hands out the episodes of a request to players in parts, so that a long episode occupies only its own player.

    Implements Evaluator.
    """

    replays = True

    def __init__(self, make: Callable[[], Player], spec: EnvSpec, lanes: int, cost: Cost, *, in_turn: bool) -> None:
        self._make, self._spec, self._lanes, self._cost, self.in_turn = make, spec, lanes, cost, in_turn
        self._replicas: list[Player] = []
        self._order: EpisodeRequest | None = None
        self._parts: deque[tuple[int, int]] = deque()  # (index of weights, first episode), not yet handed out
        self._busy: dict[Player, tuple[int, int]] = {}
        self._played: list[dict[int, EpisodeResult]] = []  # per weights: results by episode number
        self._size = 0  # players that serve this request

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
        self._replicas += [self._make() for _ in range(self._size - len(self._replicas))]

    def poll(self, wait: float) -> Sequence[Score] | FreewheelError | None:
        order, until = self._order, monotonic() + wait
        assert order is not None, "call start() first"
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
        """Return how many players serve a request of this many parts."""
        return min(parts, 1)

    def seconds(self, length: int, games: int, *, alone: bool) -> float:
        parts = -(-games // self._lanes)
        return self._round(length) * -(-parts // self.most(parts, alone=alone))

    def games(self, length: int, seconds: float) -> int:
        return int(seconds / self._round(length)) * self.most(MOST, alone=True) * self._lanes

    def _round(self, length: int) -> float:
        """Estimate the seconds of one part of this episode length; a process steps its lanes one after the other."""
        return max(1, length) * (self._cost.step + ACT) * self._lanes

    def _hand_out(self, order: EpisodeRequest) -> None:
        for player in self._replicas[: self._size]:
            if self._parts and player not in self._busy:
                which, first = self._parts.popleft()
                wanted = min(self._lanes, order.episodes - first)
                player.begin(EpisodeShare(order.weights[which], order.seed, first, wanted))
                self._busy[player] = which, first

    def _collect(self, wait: float) -> None:
        """Take the results that are ready. Wait for one only if a single player is busy."""
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
    """Uses one process per player: at most one per free core, or more if the environments mostly wait."""

    def __init__(
        self, make: Callable[[], ProcessPlayer], spec: EnvSpec, lanes: int, cost: Cost, *, in_turn: bool, busy: int = 0
    ) -> None:
        """busy: cores that training occupies, unless evaluation and training take turns."""
        super().__init__(make, spec, lanes, cost, in_turn=in_turn)
        self._cores_in_use, self._room = 0 if in_turn else busy, self._fitting()

    @override
    def start(self, order: EpisodeRequest, *, alone: bool) -> None:
        self._room = self._fitting()
        super().start(order, alone=alone)

    def _fitting(self) -> int:
        """Return how many processes fit in memory, including those that already run."""
        free = free_memory() * SHARE_OF_MEMORY
        return len(self._replicas) + int(free / self._cost.memory)

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
        executors = [player.executor for player in self._replicas if isinstance(player, ProcessPlayer)]
        for executor in executors:
            executor.hang_up()
        with ExitStack() as stack:
            for executor in executors:
                stack.enter_context(executor)


class ReservedLanes:
    """Scores the latest episodes of reserved lanes, whose weights may be a little older than the requested ones.

    Implements Evaluator in part: the simulation keeps training, so it plays only the newest weights, on its own seeds.
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
        """Return None until the first episode has ended, and then the score of the latest ones."""
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
