"""A run directory: written while a run trains, and opened again to score and show its policy."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freewheel.config.resolve import Config, from_file
from freewheel.core import Actor, Snapshot, to_numpy
from freewheel.errors import SetupError, UsageError
from freewheel.policies.numpy_actor import make_actor
from freewheel.policies.spec import PolicySpec
from freewheel.run import checkpoint
from freewheel.run.evaluate import Score, Show, eval_lanes, evaluate, play, playable
from freewheel.run.naming import find_run
from freewheel.run.plan import find_device


class RunDirectory:
    """The directory of a new run, which this process alone writes to."""

    def __init__(self, path: Path, policy: PolicySpec) -> None:
        self.path, self._policy = path, policy

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """A JSON file, whole or absent."""
        part = self.path / f".{name}.part"
        part.write_text(json.dumps(data, indent=2) + "\n")
        os.replace(part, self.path / name)

    def save(self, step: int, snapshot: Snapshot, *, best: bool = False) -> tuple[Path, str]:
        """A checkpoint of these weights; returns its folder and their fingerprint."""
        params = {name: to_numpy(value) for name, value in snapshot.params.items()}
        about = {"policy": self._policy.to_json(), "version": snapshot.version}
        folder = checkpoint.save(self.path / "checkpoints", step, params, about, best=best)
        return folder, checkpoint.fingerprint(params)


@dataclass(frozen=True)
class SavedRun:
    """A run directory, opened for reading."""

    path: Path
    config: Config

    def actor(self, which: str = "best") -> tuple[Actor, list[str]]:
        """The policy of a checkpoint (best, latest or a step), and warnings about checkpoints that could not be used."""
        found = checkpoint.load(self.path / "checkpoints", which)
        actor = make_actor(PolicySpec.from_json(found.about["policy"]))()
        actor.load(Snapshot(int(found.about["version"]), found.params))
        return actor, list(found.warnings)

    def score(self, actor: Actor, episodes: int, seed: int | None = None) -> Score:
        """Score greedy episodes; by default the episodes of the evaluations during training."""
        world, options = self.config.env, self.config.run.evaluation
        with closing(playable(world.make(eval_lanes(world, episodes)))) as env:
            chosen = options.eval_seed if seed is None else seed
            return evaluate(env, actor, episodes, chosen, options.eval_max_steps, self.config.run.contexts)

    def play(self, actor: Actor, episode: tuple[int, int], render_mode: str | None, show: Show) -> Sequence[float]:
        """Play and show one greedy episode, given by evaluation seed and number; returns its rewards."""
        limit = self.config.run.evaluation.eval_max_steps
        with closing(playable(self.config.env.make(range(1), render_mode=render_mode))) as env:
            return play(env, actor, episode, show, limit, self.config.run.contexts)


def open_run(name: str, runs_dir: str = "runs") -> SavedRun:
    """Open a run, given by its name under runs_dir or by its path."""
    path = find_run(name, runs_dir)
    try:
        resolved = from_file(path / "config.json")
    except UsageError as error:
        raise SetupError(f"{path / 'config.json'} is damaged ({error}); restore it from a copy") from None
    if resolved.env.id.startswith("__main__:") or "<" in resolved.env.id:  # <lambda>, <locals>
        remedy = "move it to a module and train on module:Name"
        raise SetupError(f"{resolved.env.id} was defined in a script and cannot be imported; {remedy}")
    if resolved.env.on_device:
        device = find_device("cpu" if resolved.run.machine.device == "cpu" else "auto")
        resolved = replace(resolved, env=resolved.env.to(device))
    return SavedRun(path, resolved)
