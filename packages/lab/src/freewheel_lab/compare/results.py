"""The results of a comparison as one value, and compare.json, the file that holds it.

Everything that is shown (terminal, table.md, report.html, plots) is a function of this value. Rates are over the measured part
of a training: start-up and the first updates are left out. `median`, `low` and `high` are over repeats, lowest and highest
included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from freewheel.errors import FileError
from freewheel.files import disk
from freewheel.files.read import json_object, record
from freewheel_lab.bench.measure import Measurement

FILE = "compare.json"
FORMAT = 1
LARGEST = 256 << 20  # bytes of compare.json: timelines may be long


@dataclass(frozen=True)
class Spread:
    """A figure over repeats."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class WorkAmount:
    """What every measurement does, in every mode but those that are too slow for it."""

    rows: int  # that are trained on (on-policy) or stored in the replay buffer
    updates: int | None  # None: the algorithm decides (a replay buffer)
    rows_per_update: int
    envs: int
    steps_per_env: int  # of each env in an update
    warm_up: int  # the first updates, which rates leave out
    seeds: tuple[int, ...]  # one for each repeat, the same in every mode
    notes: tuple[str, ...] = ()  # how the work was chosen, for the user
    parts: Mapping[str, int] = field(default_factory=dict)  # rows of each mode that does only a part of the work

    def of(self, mode: str) -> tuple[int, int | None]:
        """Rows and updates of a mode's training."""
        rows = self.parts.get(mode, self.rows)
        return rows, None if self.updates is None else rows // self.rows_per_update


@dataclass(frozen=True, kw_only=True)
class IdealSpeed:
    """What the envs would make if none of them ever waited for another or for the learner."""

    steps_per_s: float | None  # None: the env was not measured
    formula: str
    envs: int
    cores: int
    row_s: float | None = None  # mean seconds of a step and its part of a reset
    cpu_s: float | None = None  # processor seconds of the same
    step_median_s: float | None = None
    slowest_s: float | None = None  # mean seconds of the slowest of `envs` steps
    episode_steps: float | None = None  # mean length of an episode of random actions


@dataclass(frozen=True, kw_only=True)
class CaseInfo:
    """A mode that was compared, or one with an option changed (`of`)."""

    mode: str  # its label, by which rows and summary name it; of a plain mode its name
    title: str  # one line: what it does
    workers: int = 1
    envs: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)  # that differ between modes
    dependencies: tuple[str, ...] = ()  # what it needs beside this process
    command: str = ""  # the same training by hand
    free_running: bool = False  # envs never wait for each other or for an update
    synchronous: bool = True  # acting and learning take turns
    of: str | None = None  # the mode of which this is a variant: it takes no part in the ranking
    refused: str | None = None  # why it takes no part: it does not take this run, or its package is not installed
    failed: str | None = None  # why there are no results, or not all

    @property
    def problem(self) -> str:
        """What failed in one line: its first line, and its last, where an exception of the env is."""
        lines = (self.failed or "").strip().splitlines()
        return " ... ".join(dict.fromkeys([lines[0], lines[-1].strip()])) if lines else ""


@dataclass(frozen=True, kw_only=True)
class ResultRow(Measurement):
    """One training of a mode."""

    repeat: int  # from 1
    mode: str
    seed: int
    workers: int
    envs: int


@dataclass(frozen=True, kw_only=True)
class ModeFigures:
    """A mode over all repeats."""

    mode: str
    repeats: int
    steps_per_s: Spread
    episodes_per_s: Spread | None  # steps/s over the length of the episodes in the same trainings
    episode_steps: float | None = None  # mean length; None: no episode has ended
    updates_per_s: Spread
    time_100k_episodes_s: float | None
    speedup: Spread | None  # over sequential, repeat by repeat
    efficiency: float | None  # median steps/s over the ideal
    startup_s: Spread | None
    return_final: Spread | None
    return_at: float | None  # median return when the fastest training of all had ended (`Results.equal_wall_s`)
    lag_mean: float | None
    lag_max: float | None
    memory_mb: float | None
    cpu_util: float | None
    gpu_util: float | None
    dropped: int  # rows of all repeats, without those under way when a training ended
    shares: Mapping[str, Mapping[str, float]]  # mean over trainings


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """A mode with so many workers."""

    mode: str
    workers: int
    envs: int
    predicted: float  # env steps/s by the law
    limit: str  # what it waits for, by the law: envs, barrier, cores or learner
    a_core_each: float | None = None  # the same law on a machine with a core for every worker and one for the learner
    measured: Spread | None = None  # None: extrapolated
    error: float | None = None  # predicted / measured - 1
    failed: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScalingResults:
    """Env steps/s over the number of workers."""

    law: str
    points: tuple[ScalePoint, ...]
    extrapolated: tuple[ScalePoint, ...]  # 10 .. 200 workers
    pays_up_to: Mapping[str, int]  # of each mode: twice as many workers as these bring less than 25 % more
    verdict: tuple[str, ...]  # the same in words, a line for each mode
    assumptions: tuple[str, ...]
    fitted: Mapping[str, float]  # the numbers of the law
    rows: tuple[ResultRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModePair:
    """Two ways beside each other, or what one part of the difference is worth."""

    what: str  # sync against async, overlap, no barrier, CUDA graphs
    before: str  # label of a mode
    after: str
    gain: Spread | None  # steps/s of `after` over `before`; None: not measured here
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to use."""

    mode: str
    sentence: str
    margin: float | None  # above the next mode, e.g. 0.12; None: there is no other
    within_noise: bool
    command: str  # what to type
    steps_per_s: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """A comparison."""

    env: str
    algo: str
    command: str
    created: str
    hardware: Mapping[str, Any]
    work: WorkAmount
    ideal: IdealSpeed
    budget_s: float
    repeats: int
    modes: tuple[CaseInfo, ...]
    rows: tuple[ResultRow, ...] = ()
    summary: tuple[ModeFigures, ...] = ()
    equal_work: str = ""  # whether all trainings had the same rows and updates, in words
    equal_wall_s: float | None = None  # when the fastest training had ended: returns are compared then
    scale: ScalingResults | None = None
    pairs: tuple[ModePair, ...] = ()
    timelines: Mapping[str, Any] = field(default_factory=dict)  # mode -> timeline.to_json()
    recommendation: Recommendation | None = None
    ended: Literal["complete", "interrupted"] = "complete"
    wall_s: float = 0.0  # of the whole comparison
    format: int = FORMAT

    def figures(self, mode: str) -> ModeFigures | None:
        """Of a mode, if there are any."""
        return next((one for one in self.summary if one.mode == mode), None)

    def case(self, mode: str) -> CaseInfo:
        """What is known of a mode; KeyError if it was not compared."""
        found = next((one for one in self.modes if one.mode == mode), None)
        if found is None:
            raise KeyError(mode)
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, folder: Path) -> Path:
        """compare.json, whole at any moment."""
        path = folder / FILE
        disk.replace(path, (json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n").encode())
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """Of a folder or a file; FileError if it is no comparison."""
        file = path / FILE if path.is_dir() else path
        data = json_object(file, LARGEST)
        if data.get("format") != FORMAT:
            raise FileError(f"{file} is no comparison of this version (format {data.get('format')}): compare again")
        return record(cls, data, str(file))
