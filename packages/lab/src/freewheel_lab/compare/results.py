"""This module defines the results of a comparison as one value, and reads and writes compare.json,
which holds it.

The terminal output, table.md, report.html and plots are computed from this value. Rates cover the
measured part of a training, without start-up and the first updates. `median`, `low` and `high` are
the median, minimum and maximum over repeats.
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
LARGEST = 256 << 20  # bytes of compare.json; timelines may be long


@dataclass(frozen=True)
class Spread:
    """A figure over all repeats."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class WorkAmount:
    """Holds the amount of work of every measurement. Modes that are too slow do only a part of it."""

    rows: int  # rows trained on (on-policy) or stored in the replay buffer
    updates: int | None  # None: the algorithm decides (replay buffer)
    rows_per_update: int
    envs: int
    steps_per_env: int  # steps of each env in an update
    warm_up: int  # number of first updates that rates exclude
    seeds: tuple[int, ...]  # one for each repeat, the same in every mode
    notes: tuple[str, ...] = ()  # how the work was chosen, for the user
    parts: Mapping[str, int] = field(default_factory=dict)  # rows of each mode that does only a part of the work

    def of(self, mode: str) -> tuple[int, int | None]:
        """Return the rows and updates of a mode's training."""
        rows = self.parts.get(mode, self.rows)
        return rows, None if self.updates is None else rows // self.rows_per_update


@dataclass(frozen=True, kw_only=True)
class IdealSpeed:
    """Holds the speed of envs that never wait for one another or for the learner."""

    steps_per_s: float | None  # None: the env was not measured
    formula: str
    envs: int
    cores: int
    row_s: float | None = None  # mean seconds of a step, with its share of a reset
    cpu_s: float | None = None  # processor seconds of the same
    step_median_s: float | None = None
    slowest_s: float | None = None  # mean seconds of the slowest of `envs` steps
    episode_steps: float | None = None  # mean length of an episode of random actions


@dataclass(frozen=True, kw_only=True)
class CaseInfo:
    """Describes a mode that was compared, or a variant of it with one option changed (`of`)."""

    mode: str  # label that rows and summary use; for a plain mode it is its name
    title: str  # one line about what it does
    workers: int = 1
    envs: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)  # options that differ between modes
    dependencies: tuple[str, ...] = ()  # what it needs in addition to this process
    command: str = ""  # the command for the same training
    free_running: bool = False  # envs never wait for each other or for an update
    synchronous: bool = True  # acting and learning take turns
    of: str | None = None  # the mode of which this is a variant; variants are not ranked
    refused: str | None = None  # why it was skipped: it does not accept this run, or its package is not installed
    failed: str | None = None  # why results are missing or incomplete

    @property
    def problem(self) -> str:
        """Return the failure in one line. It joins the first line and the last one, which names the
        exception of the env."""
        lines = (self.failed or "").strip().splitlines()
        return " ... ".join(dict.fromkeys([lines[0], lines[-1].strip()])) if lines else ""


@dataclass(frozen=True, kw_only=True)
class ResultRow(Measurement):
    """Holds one training of a mode."""

    repeat: int  # counted from 1
    mode: str
    seed: int
    workers: int
    envs: int


@dataclass(frozen=True, kw_only=True)
class ModeFigures:
    """Holds the figures of a mode over all repeats."""

    mode: str
    repeats: int
    steps_per_s: Spread
    episodes_per_s: Spread | None  # steps/s divided by the length of the episodes in the same trainings
    episode_steps: float | None = None  # mean length; None: no episode has ended
    updates_per_s: Spread
    time_100k_episodes_s: float | None
    speedup: Spread | None  # relative to sequential, in each repeat
    efficiency: float | None  # median steps/s divided by the ideal
    startup_s: Spread | None
    return_final: Spread | None
    return_at: float | None  # median return when the fastest training had ended (`Results.equal_wall_s`)
    lag_mean: float | None
    lag_max: float | None
    memory_mb: float | None
    cpu_util: float | None
    gpu_util: float | None
    dropped: int  # sum of all repeats, without the rows that were under way when a training ended
    shares: Mapping[str, Mapping[str, float]]  # mean over trainings


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """Holds the speed of a mode with a given number of workers."""

    mode: str
    workers: int
    envs: int
    predicted: float  # env steps/s by the law
    limit: str  # what limits the speed by the law: envs, barrier, cores or learner
    a_core_each: float | None = None  # the same law for a machine with a core for every worker and one for the learner
    measured: Spread | None = None  # None: extrapolated
    error: float | None = None  # predicted / measured - 1
    failed: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScalingResults:
    """Holds env steps/s over the number of workers."""

    law: str
    points: tuple[ScalePoint, ...]
    extrapolated: tuple[ScalePoint, ...]  # 10 .. 200 workers
    pays_up_to: Mapping[str, int]  # of each mode: twice this number of workers brings less than 25 % more
    verdict: tuple[str, ...]  # the same as text, one line for each mode
    assumptions: tuple[str, ...]
    fitted: Mapping[str, float]  # parameters of the law
    rows: tuple[ResultRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModePair:
    """Compares two modes, or says what one part of their difference is worth."""

    what: str  # sync against async, overlap, no barrier, CUDA graphs
    before: str  # label of a mode
    after: str
    gain: Spread | None  # steps/s of `after` divided by those of `before`; None: not measured
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Holds the recommended mode."""

    mode: str
    sentence: str
    margin: float | None  # relative to the next mode, e.g. 0.12; None: there is no other mode
    within_noise: bool
    command: str  # the command to type
    steps_per_s: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """Holds all results of a comparison."""

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
    equal_work: str = ""  # says whether all trainings had the same rows and updates
    equal_wall_s: float | None = None  # when the fastest training had ended; returns are compared at this time
    scale: ScalingResults | None = None
    pairs: tuple[ModePair, ...] = ()
    timelines: Mapping[str, Any] = field(default_factory=dict)  # mode -> timeline.to_json()
    recommendation: Recommendation | None = None
    ended: Literal["complete", "interrupted"] = "complete"
    wall_s: float = 0.0  # duration of the whole comparison
    format: int = FORMAT

    def figures(self, mode: str) -> ModeFigures | None:
        """Return the figures of a mode, or None if there are none."""
        return next((one for one in self.summary if one.mode == mode), None)

    def case(self, mode: str) -> CaseInfo:
        """Return the description of a mode. Raise KeyError if it was not compared."""
        found = next((one for one in self.modes if one.mode == mode), None)
        if found is None:
            raise KeyError(mode)
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, folder: Path) -> Path:
        """Write compare.json. Readers never see a partial file."""
        path = folder / FILE
        disk.replace(path, (json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n").encode())
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the results from a folder or a file. Raise FileError if it holds no comparison."""
        file = path / FILE if path.is_dir() else path
        data = json_object(file, LARGEST)
        if data.get("format") != FORMAT:
            raise FileError(
                f"{file} has format {data.get('format')}, which this version cannot read; run the comparison again"
            )
        return record(cls, data, str(file))
