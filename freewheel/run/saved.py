"""A run on disk: its config, its weights, and its policy playing again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from freewheel.config import resolve as config
from freewheel.config.resolve import Config
from freewheel.core import Actor, Snapshot
from freewheel.envs.gym import GymConfig
from freewheel.errors import SetupError, UsageError
from freewheel.policies.numpy_actor import make_actor
from freewheel.policies.spec import PolicySpec
from freewheel.run import checkpoint
from freewheel.run.evaluate import Score, Show, eval_lanes, evaluate, play, playable
from freewheel.run.plan import find_device, find_run


@dataclass(frozen=True)
class SavedRun:
    """A run directory, opened for reading."""

    path: Path
    config: Config

    def actor(self, which: str = "best") -> tuple[Actor, list[str]]:
        """The policy of a checkpoint (best, latest or a step), and what had to be passed over to find it."""
        found = checkpoint.load(self.path / "checkpoints", which)
        actor = make_actor(PolicySpec.from_json(found.about["policy"]))()
        actor.load(Snapshot(int(found.about["version"]), found.params))
        return actor, list(found.warnings)

    def score(self, actor: Actor, episodes: int, seed: int | None = None) -> Score:
        """Greedy episodes; by default those the run itself was evaluated on."""
        world = self.config.env
        env = playable(world.make(eval_lanes(world, episodes)))
        try:
            options = self.config.run
            chosen = options.eval_seed if seed is None else seed
            return evaluate(env, actor, episodes, chosen, options.eval_max_steps, options.contexts)
        finally:
            env.close()

    def play(self, actor: Actor, episode: tuple[int, int], render_mode: str | None, show: Show) -> Sequence[float]:
        """One greedy episode, (evaluation seed, number), shown."""
        env = playable(self.config.env.make(range(1), render_mode=render_mode))
        try:
            return play(env, actor, episode, show, self.config.run.eval_max_steps, self.config.run.contexts)
        finally:
            env.close()


def open_run(name: str, runs_dir: str = "runs") -> SavedRun:
    """The run of this name under runs_dir, or at this path."""
    path = find_run(name, runs_dir)
    try:
        resolved = config.from_file(path / "config.json")
    except UsageError as error:
        raise SetupError(f"{path / 'config.json'} is damaged ({error}); restore it from a copy") from None
    if resolved.env.id.startswith("__main__:") or "<" in resolved.env.id:  # <lambda>, <locals>
        raise SetupError(
            f"{resolved.env.id} was defined in a script and cannot be found again; put it in a module and train on module:Name"
        )
    if not isinstance(resolved.env, GymConfig):
        device = find_device("cpu" if resolved.run.device == "cpu" else "auto")
        resolved = replace(resolved, env=replace(resolved.env, device=device))
    return SavedRun(path, resolved)
