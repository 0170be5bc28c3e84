"""Run directories: written while a run trains, and opened later to score and show its policy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freewheel.config.machine import find_device_again
from freewheel.config.resolve import Config, from_file, from_options
from freewheel.config.trust import Use
from freewheel.core import Actor, Env, EnvSpec, Snapshot, to_numpy
from freewheel.errors import SetupError, UsageError
from freewheel.files import disk, signatures
from freewheel.files.lock import FileLock, HeldError
from freewheel.files.outage import Outage, twice
from freewheel.files.reach import check_folder
from freewheel.files.read import json_object
from freewheel.metrics import targets
from freewheel.policies.layout import Layout
from freewheel.run.checkpoints import checkpoint
from freewheel.run.checkpoints.checkpoint import Checkpoint
from freewheel.run.checkpoints.store import KEEP, Store
from freewheel.run.evaluation.episodes import Score, Show, eval_lanes, evaluate, play, playable
from freewheel.run.learners.devices import placed
from freewheel.run.naming import CHECKPOINTS, CONFIG, LOCK, METRICS, SUMMARY, Result, locate
from freewheel.run.plan import Plan
from freewheel.run.policy import actor_of, read_spec
from freewheel.seeding import scoring_seed

TARGETS = targets.FILE
FILES = CONFIG, SUMMARY, TARGETS


class RunDirectory:
    """The directory of a run; only this process writes to it. Disk failures are not raised: `say` reports each once,
    and `keep` retries the failed writes."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self.path, self._say = plan.path.absolute(), say
        several = plan.config.run.machine.learners > 1  # one may have died during the save before the closing one
        self.store = Store(self.path / CHECKPOINTS, KEEP + several)
        options, described = plan.config.to_json(), plan.policy.to_json()
        self._config = {**options, signatures.FIELD: signatures.signature("config", options)}
        about = {"policy": described, "env": plan.spec.name, "layout": dict(plan.spec.layout)}
        # A user's network is code. The signature shows later who named it; without one it is not imported.
        signed = {signatures.FIELD: signatures.signature("policy", described)} if plan.policy.module else {}
        self.about: Mapping[str, Any] = about | signed
        self._setup = plan.setup.to_json()
        self.outages = {what: Outage(str(self.path / what), say) for what in (*FILES, CHECKPOINTS)}
        self._unsaved: tuple[int, Snapshot] | None = None  # the best weights, if they could not be saved yet

    @property
    def problems(self) -> list[str]:
        """One line for each file that could not be written at the last attempt."""
        return [outage.problem for outage in self.outages.values() if outage.problem]

    def keep(self) -> None:
        """Recreate removed or missing files, and save the best weights if that failed before."""
        if any(self.outages[name].problem for name in (CONFIG, TARGETS)) or not (self.path / CONFIG).is_file():
            if not self.path.is_dir():
                self._say(f"{self.path} was removed while the run was writing to it; it is created again")
            self.write(CONFIG, self._config)
            self.write(TARGETS, self._setup)
        if self._unsaved is not None:
            self.save(*self._unsaved, best=True)

    def write(self, name: str, data: Mapping[str, Any]) -> bool:
        """Write a JSON file atomically; return whether that succeeded."""
        encoded = (json.dumps(signatures.sealed(data), indent=2) + "\n").encode()

        def write() -> None:
            checkpoint.make_private(self.path)
            disk.replace(self.path / name, encoded)

        with self.outages[name].noted():
            twice(write)
        return self.outages[name].error is None

    def save(self, step: int, snapshot: Snapshot, *, best: bool = False) -> Path | None:
        """Save a checkpoint of these weights, which must be finite; return its folder, or None if the disk failed."""
        params = {name: to_numpy(value) for name, value in snapshot.params.items()}
        checkpoint.require_finite(step, params)
        about = {**self.about, "version": snapshot.version}
        folder: Path | None = None
        with self.outages[CHECKPOINTS].noted():
            folder = twice(lambda: self.store.save(step, params, about, best=best)).folder
        if best:
            self._unsaved = (step, snapshot) if folder is None else None
        return folder

    @property
    def metrics_size(self) -> int:
        """The size of metrics.jsonl in bytes."""
        try:
            return (self.path / METRICS).lstat().st_size
        except OSError:
            return 0

    def go_back(self, metrics_size: int = 0) -> None:
        """Remove the summary and the metrics written after the checkpoint, because the run repeats that work; without a
        checkpoint it repeats everything. SetupError if the run would write through a link."""
        try:
            check_folder(self.store.root)
            for path in self.path.glob("*.jsonl"):
                disk.open_end(path).close()
            if self.metrics_size > metrics_size:
                with disk.open_end(self.path / METRICS) as file:
                    disk.cut(file, metrics_size)
            disk.remove(self.path / SUMMARY)
        except OSError as error:
            raise SetupError(f"cannot write in {self.path}: {error.strerror}") from None
        self.write(CONFIG, self._config)
        self.write(TARGETS, self._setup)


def lock_run(path: Path) -> FileLock:
    """Lock a run directory for its trainer; SetupError if another trainer holds it. Readers need no lock."""
    try:
        return FileLock(path / LOCK)
    except HeldError as error:
        raise SetupError(f"{path} is being trained by process {error.pid}: wait for it, or stop it") from None
    except OSError as error:
        raise SetupError(f"cannot write in {path}: {error.strerror}") from None


@dataclass(frozen=True)
class SavedRun:
    """A run directory, opened for reading."""

    path: Path
    config: Config
    which: str = "best"  # the chosen checkpoint: best, latest or a step
    trust: bool = False  # code that it names may be imported, regardless of its author

    def actor(self, which: str = "") -> tuple[Actor, list[str]]:
        """Return the policy of a checkpoint, and warnings about unusable checkpoints."""
        found = checkpoint.load(self.path / CHECKPOINTS, which or self.which)
        return actor_of(found, trust=self.trust), list(found.warnings)

    def score(self, actor: Actor, episodes: int, seed: int | None = None) -> Score:
        """Score greedy episodes, by default ones that no evaluation of the run has played."""
        world, options = self.config.env, self.config.run.evaluation
        with closing(self._open(eval_lanes(world, episodes), fault_tolerant=True)) as env:
            chosen = scoring_seed(options.eval_seed) if seed is None else seed
            return evaluate(env, actor, episodes, chosen, options.eval_max_steps, self.config.run.contexts)

    def play(self, actor: Actor, episode: tuple[int, int], render_mode: str | None, show: Show) -> Sequence[float]:
        """Play and show one greedy episode, given by evaluation seed and number; return its rewards."""
        limit = self.config.run.evaluation.eval_max_steps
        with closing(self._open(range(1), render_mode)) as env:
            return play(env, actor, episode, show, limit, self.config.run.contexts)

    def _open(self, lanes: range, render_mode: str | None = None, *, fault_tolerant: bool = False) -> Env:
        """Open the environment; SetupError, with the difference, if its spaces differ from those of the training."""
        with ExitStack() as undo:
            env = playable(self.config.env.make(lanes, fault_tolerant=fault_tolerant, render_mode=render_mode))
            undo.callback(env.close)
            check_fit(checkpoint.load(self.path / CHECKPOINTS), env.spec)
            undo.pop_all()
        return env


def open_run(
    run: str | os.PathLike[str] | Result,
    runs_dir: str = "runs",
    env: str | Callable[..., Any] | None = None,
    *,
    which: str = "",
    usual: str = "best",
    trust: bool = False,
    use: Use = "play",
) -> SavedRun:
    """Open a run, given by its name under runs_dir, its path, a train() result, RUN@STEP or the path of a checkpoint.

    `env` replaces its environment; `which` selects one of its checkpoints. trust: code that the run names may be
    imported even if this user did not create the run here. use: "play" imports only its environment and network.
    """
    place = locate(run if isinstance(run, str) else str(getattr(run, "path", run)), runs_dir, which, usual)
    path = place.run
    try:
        resolved = from_file(path / CONFIG, trust=trust, use=use if env is None else "nothing")
    except UsageError as error:
        raise SetupError(f"{path / CONFIG} is damaged ({error}); restore it from a copy") from None
    if env is not None:
        resolved = from_file(path / CONFIG, env, trust=trust, use=use)
    elif (name := resolved.env.id).startswith("__main__:") or "<" in name:  # <lambda>, <locals>
        kind = name.rpartition(":")[2].rpartition(".")[2]
        own = kind if kind.isidentifier() else "Env"
        ways = f"env={own} to this call in Python, --env ./file.py:{own} to this command"
        raise SetupError(f"{name} was defined in a script and cannot be imported; add {ways}")
    signatures.unsealed(json_object(path / CONFIG), str(path / CONFIG))
    if resolved.env.on_device:
        resolved = replace(resolved, env=resolved.env.to(find_device_again(resolved.run.machine.device)))
    return SavedRun(path, resolved, place.which, trust)


def check_fit(saved: Checkpoint, spec: EnvSpec) -> None:
    """Raise SetupError if the policy was trained on different spaces."""
    if (layout := saved.about.get("layout")) and spec.layout:
        where = f"layout of {saved.path / checkpoint.POLICY}"
        reason = Layout.from_json(layout, where).misfit(Layout.from_json(spec.layout))
    else:  # saved by a version whose checkpoints lack the spaces
        policy = read_spec(saved)
        ours, theirs = (policy.obs_size, policy.action_size), (spec.obs_size, spec.action.size)
        words = "{} observation columns and {} actions"
        reason = (
            "" if ours == theirs else f"the policy has {words.format(*ours)}, the environment {words.format(*theirs)}"
        )
    if reason:
        raise SetupError(f"{spec.name} does not fit the policy: {reason}")


def layout_of_env(env: str | Callable[..., Any], saved: Checkpoint) -> Layout:
    """Return the spaces of an environment, for a policy that was saved without them."""
    with closing(placed(from_options(env, {}))[0].env.make(range(1))) as made:
        check_fit(saved, made.spec)
        return Layout.from_json(made.spec.layout)
