"""Adaptive control: choose, from metrics rows, how many workers act, how long fragments are and how many may wait.

`decide` is a pure function of its state and a metrics row. It uses the means of a window of several rows and several
updates, because env rows arrive in bursts if an update takes longer than a metrics row. If a mean is outside its band,
a setting is changed. The next window is ignored, and the two after it judge the change: if fewer env rows arrive in
both, it is undone and not tried again for a while. The bands for raising and for lowering a setting do not touch, so
that under a steady load every setting moves one way and stays there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import Any, Literal, NamedTuple, TypeAlias

Name: TypeAlias = Literal["workers", "fragment", "slots", "burst"]

QUEUE = 0.5, 0.8  # band of its fill level
GPU = 0.9  # share of time that the GPU should be busy
CPU = 0.8  # share of the processor in use above which more workers would only compete for it
IDLE, SMALL = 0.1, 0.02  # shares of time spent waiting: above IDLE a change pays; below SMALL they are negligible
SURPLUS = 0.3  # share of time that workers wait for the learner above which there are too many workers
FRAGMENTS = 200.0  # most per second: each costs the learner and a worker a wake-up, about 0.1 ms
WORSE = 0.9  # a change is undone if the rows per second fall below this share of the rate before it
BAN = 10  # windows in which a change that was undone is not tried again; doubled each time
UPDATES = 4  # in a window, at least ...
LONGEST = 8  # ... unless the window has this many times the required rows
GOAL = 0.65  # fill level to aim at when the queue is made shorter


@dataclass(frozen=True)
class Settings:
    """The settings that can change during a run."""

    workers: int  # workers that act at a time
    fragment: int  # steps, at most
    slots: int  # fragments of a worker that may wait for the learner
    burst: int = 0  # updates before the learner looks for new rows; 0: not adjustable


@dataclass(frozen=True)
class Plant:
    """The limits of the settings and the sizes of the run."""

    least: Settings
    most: Settings
    lanes: int = 1  # of a worker
    patience: int = 5  # rows of a window, at least


class Change(NamedTuple):
    """A change of one setting."""

    setting: Name
    before: int
    after: int
    reason: str

    def __str__(self) -> str:
        return f"adapt: {TITLES[self.setting]} {self.before} -> {self.after}: {self.reason}"


TITLES: Mapping[Name, str] = {
    "workers": "workers at a time",
    "fragment": "steps of a fragment",
    "slots": "fragments that may wait of each worker",
    "burst": "updates at a time",
}


@dataclass(frozen=True)
class Trial:
    """A change whose effect is being measured."""

    setting: Name
    before: int
    rate: float  # rows per second before the change
    poor: bool = False  # fewer came in the first measured window


@dataclass(frozen=True)
class Window:
    """Metrics rows that are judged together."""

    began: tuple[float, int, int]  # wall time, env steps and updates before its first row
    last: tuple[float, int, int]  # after its last row
    rows: int = 0
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by metric: weighted sum, weight

    def with_row(self, row: Mapping[str, Any]) -> Window:
        """Add a metrics row. The workers' time shares are weighted by env steps, all other metrics by time."""
        now, sums = position(row), dict(self.sums)
        for name in WATCHED:
            weight = now[1] - self.last[1] if name.startswith("time/worker") else now[0] - self.last[0]
            if (value := row.get(name)) is not None and weight > 0:
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = total + weight * value, weights + weight
        return Window(self.began, now, self.rows + 1, sums)

    def complete(self, patience: int) -> bool:
        updates = self.last[2] - self.began[2]
        return self.rows >= patience and (updates >= UPDATES or self.rows >= LONGEST * patience)

    @property
    def rate(self) -> float:
        """Env rows per second."""
        return (self.last[1] - self.began[1]) / max(self.last[0] - self.began[0], 1e-9)

    def mean(self, name: str) -> float | None:
        total, weight = self.sums.get(name, (0.0, 0.0))
        return total / weight if weight else None


WAITS = tuple(f"time/worker_wait_{what}" for what in ("credit", "slot", "gate"))
WATCHED = (*WAITS, "time/learner_wait_data", "queue_util", "cpu_util", "gpu_util", "workers/turns")


def position(row: Mapping[str, Any]) -> tuple[float, int, int]:
    return float(row["wall_s"]), int(row["env_steps"]), int(row["updates"])


@dataclass(frozen=True)
class ControlState:
    """Everything that a decision depends on, except the row."""

    settings: Settings
    window: Window | None = None  # None: the next row begins a window
    settling: bool = True  # this window comes right after a change, or after the start
    trial: Trial | None = None
    ways: Mapping[str, int] = field(default_factory=dict)  # by setting: the direction of its last change, 1 or -1
    banned: Mapping[str, tuple[int, int]] = field(
        default_factory=dict
    )  # by change: windows left, windows of the next ban

    def to_json(self) -> dict[str, Any]:
        """Return what a later session continues from."""
        return asdict(self.settings)


def within(settings: Settings, least: Settings, most: Settings) -> Settings:
    """Return the nearest possible settings."""
    names: tuple[Name, ...] = ("workers", "fragment", "slots", "burst")
    possible = {name: max(getattr(least, name), min(getattr(settings, name), getattr(most, name))) for name in names}
    return Settings(**possible)


def decide(state: ControlState, row: Mapping[str, Any], plant: Plant) -> tuple[ControlState, Change | None]:
    """Return the state after this row, and the change to make now, if any."""
    if state.window is None:
        return replace(state, window=Window(position(row), position(row))), None
    window = state.window.with_row(row)
    if not window.complete(plant.patience):
        return replace(state, window=window), None
    banned = {key: (left - 1, following) for key, (left, following) in state.banned.items()}
    settled, state = (
        not state.settling,
        replace(state, window=Window(window.last, window.last), settling=False, banned=banned),
    )
    if not settled:
        return state, None
    if state.trial is not None:
        state, back = _judged(state, state.trial, window)
        if back is not None or state.trial is not None:
            return state, back
    change = next((one for one in _wishes(state.settings, window, plant) if _allowed(state, one)), None)
    if change is None:
        return state, None
    return _changed(state, change, Trial(change.setting, change.before, window.rate)), change


def _changed(state: ControlState, change: Change, trial: Trial | None) -> ControlState:
    """Apply a change. If a setting reverses, its former direction is banned for a while, twice as long each time."""
    settings, way, banned = (
        replace(state.settings, **{change.setting: change.after}),
        _direction(change),
        dict(state.banned),
    )
    before = state.ways.get(change.setting, way)
    if before != way:
        key = f"{change.setting} {_sign(before)}"
        windows = banned.get(key, (0, BAN))[1]
        banned[key] = windows, 2 * windows
    ways = {**state.ways, change.setting: way}
    return replace(state, settings=settings, settling=True, trial=trial, banned=banned, ways=ways)


def _judged(state: ControlState, trial: Trial, window: Window) -> tuple[ControlState, Change | None]:
    """Undo a change after which fewer rows come in two windows."""
    state, now = replace(state, trial=None), getattr(state.settings, trial.setting)
    if window.rate >= WORSE * trial.rate:
        return state, None
    if not trial.poor:
        return replace(state, trial=replace(trial, poor=True)), None
    why = f"{window.rate:,.0f} rows/s came instead of {trial.rate:,.0f}, undone"
    back = Change(trial.setting, now, trial.before, why)
    return _changed(state, back, None), back


def _allowed(state: ControlState, change: Change) -> bool:
    left, _ = state.banned.get(f"{change.setting} {_sign(_direction(change))}", (0, 0))
    return change.after != change.before and left <= 0


def _direction(change: Change) -> int:
    return 1 if change.after > change.before else -1


def _sign(number: int) -> str:
    return "up" if number > 0 else "down"


def _wishes(settings: Settings, window: Window, plant: Plant) -> Iterator[Change]:
    """Yield the changes that this window calls for, the most useful first and all within the limits."""

    def change(setting: Name, value: int, reason: str) -> Change:
        after = max(getattr(plant.least, setting), min(value, getattr(plant.most, setting)))
        return Change(setting, getattr(settings, setting), after, reason)

    seen = _TimeShares.of(window, plant.most.workers)
    fragments = window.rate / (settings.fragment * plant.lanes)
    if fragments > FRAGMENTS:
        longer = ceil(settings.fragment * fragments / FRAGMENTS)
        yield change("fragment", longer, f"{fragments:,.0f} fragments a second cost wake-ups")
    if seen.workers_wait > SURPLUS and seen.learner_waits < IDLE:
        enough = ceil(settings.workers * (1.0 - seen.workers_wait)) + 1
        reason = f"the learner is the limit, workers wait {100 * seen.workers_wait:.0f} % of the time"
        yield change("burst", 2 * settings.burst, reason)
        yield change("workers", min(enough, settings.workers), reason)
    elif seen.learner_waits > IDLE and seen.workers_wait < IDLE and (window.mean("cpu_util") or 0.0) < CPU:
        yield change("workers", ceil(1.25 * settings.workers), _why_more(window, seen))
    if seen.queue is not None and (seen.queue > QUEUE[1] or seen.wait_slot > IDLE / 2):
        full = f"the queue is {100 * seen.queue:.0f} % full"
        yield change(
            "slots", ceil(1.5 * settings.slots), f"{full}, workers wait for it {100 * seen.wait_slot:.0f} % of the time"
        )
    elif seen.queue is not None and seen.queue < QUEUE[0] and seen.wait_slot < SMALL and seen.learner_waits < IDLE:
        shorter = max(1, ceil(settings.slots * seen.queue / GOAL))
        yield change("slots", min(shorter, settings.slots), f"the queue is only {100 * seen.queue:.0f} % full")


def _why_more(window: Window, seen: _TimeShares) -> str:
    """Return the reason for more workers, with the metrics that are below their targets."""
    below = [
        f"{name} {100 * value:.0f} %"
        for name, key, least in (("GPU", "gpu_util", GPU), ("CPU", "cpu_util", CPU))
        if (value := window.mean(key)) is not None and value < least
    ]
    return f"the learner waits for rows {100 * seen.learner_waits:.0f} % of the time" + (
        f" ({', '.join(below)})" if below else ""
    )


class _TimeShares(NamedTuple):
    """Shares of time, and the fill level of the queue."""

    workers_wait: float  # for the learner, as a share of the time of workers that may act
    wait_slot: float
    learner_waits: float
    queue: float | None

    @classmethod
    def of(cls, window: Window, workers: int) -> _TimeShares:
        """Compute the shares; waiting for a turn does not count as waiting for the learner."""
        credit, slot, gate = (window.mean(name) or 0.0 for name in WAITS)
        acting = min((window.mean("workers/turns") or workers) / max(workers, 1), 1.0)
        waits = max(0.0, 1.0 - (1.0 - min(credit + slot + gate, 1.0)) / acting)
        return cls(waits, slot, window.mean("time/learner_wait_data") or 0.0, window.mean("queue_util"))
