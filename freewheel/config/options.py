"""Options of a run that do not depend on its world, its algorithm or its mode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np

from freewheel.config import flags
from freewheel.core import NO_CONTEXT, Compile, NDArray
from freewheel.errors import UsageError, require_positive
from freewheel.metrics.meter import Budget

DEFAULT_STEPS = 100_000


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """When the run ends: at the first of these limits."""

    steps: int | None = None
    """Stop after this many environment steps (default: 100000, if no other limit is given)."""
    minutes: float | None = None
    """Stop after this many minutes."""
    episodes: int | None = None
    """Stop after this many finished episodes."""

    def __post_init__(self) -> None:
        require_positive(steps=self.steps, minutes=self.minutes, episodes=self.episodes)


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Evaluation during training: episodes of the greedy policy."""

    evals: int = 5
    """Number of evaluations, evenly spaced over the run; the last one is at its end. 0: none."""
    eval_episodes: int = 20
    """Episodes of each evaluation."""
    eval_max_steps: int = 10_000
    """Stop an evaluation episode after this many steps, for environments without a time limit."""
    eval_seed: int = 1000
    """Seed of the evaluation episodes; the same seed gives the same episodes in every mode and algorithm."""

    def __post_init__(self) -> None:
        require_positive(eval_episodes=self.eval_episodes, eval_max_steps=self.eval_max_steps)
        _require_natural(evals=self.evals, eval_seed=self.eval_seed)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What the run writes, and where."""

    name: Annotated[str, flags.named("run")] = ""
    """Name of the run, which is its directory under --runs-dir (default: env-algo-mode, numbered)."""
    runs_dir: str = "runs"
    """The directory that contains all runs."""
    log_every: float = 1.0
    """Seconds between two rows of metrics."""
    console: Literal["live", "classic"] = "live"
    """live: a panel that is updated on a terminal, plain lines elsewhere; classic: one line of counters per row of metrics
    ([AsyncMBPO] step=1000 ...)."""
    sinks: tuple[str, ...] = ()
    """Sinks to write metrics to in addition to the usual ones, by name (those of installed packages)."""

    def __post_init__(self) -> None:
        require_positive(log_every=self.log_every)
        if "/" in self.name or self.name.startswith("."):
            raise UsageError(f"--run '{self.name}' must be a plain name; --runs-dir chooses the directory")


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The hardware that the learner uses."""

    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where the learner computes; auto: on a GPU if there is one."""
    threads: int = 1
    """CPU threads of the learner; small networks are fastest with one."""
    compile: Compile = "graphs"
    """graphs: on a GPU, record operations of fixed shape as CUDA graphs and replay them; off: launch every operation."""

    def __post_init__(self) -> None:
        require_positive(threads=self.threads)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run."""

    seed: int = 0
    """Seed of all random numbers of the run."""
    num_steps_per_env: int = 64
    """Steps of each environment in one on-policy update; with a replay buffer: between two versions of the acting policy."""
    init: str = ""
    """Start with the weights of another run, given as a name under --runs-dir or a path: its best weights, or RUN@latest, or
    RUN@STEP."""
    context: flags.Table = ()
    """Contexts as JSON, one per row ([[1,0],[0,1]]). Every episode gets one, chosen by its seed: reset() receives it as
    options["context"], and the observation must contain it under "context"."""
    limits: LimitOptions = field(default_factory=LimitOptions)
    evaluation: EvalOptions = field(default_factory=EvalOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)

    def __post_init__(self) -> None:
        require_positive(num_steps_per_env=self.num_steps_per_env)
        _require_natural(seed=self.seed)

    @property
    def contexts(self) -> NDArray:
        """[K, C] float32."""
        return np.array(self.context, np.float32) if self.context else NO_CONTEXT

    @property
    def budget(self) -> Budget:
        """The limits, with the default where none is given."""
        steps, minutes, episodes = self.limits.steps, self.limits.minutes, self.limits.episodes
        return Budget(DEFAULT_STEPS if steps is minutes is episodes is None else steps, minutes, episodes)


def _require_natural(**options: int) -> None:
    for name, value in options.items():
        if value < 0:
            raise UsageError(f"--{name.replace('_', '-')} must not be negative, but is {value}")
