"""Hooks: harder contexts as the agent improves, a learning rate of your own, a metric of your own, and an early end."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

import freewheel

LONGEST = 8


class Corridor(gymnasium.Env[Any, Any]):
    """Walk right to the end; the context of an episode is the length of its corridor."""

    observation_space = Dict(place=Box(0, 50, (1,)), context=Box(0, 50, (1,)))
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.length = np.array((options or {}).get("context", [1.0]), np.float32)
        self.place = self.steps = 0
        return self.see(), {}

    def see(self) -> dict[str, Any]:
        return {"place": np.array([self.place], np.float32), "context": self.length}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place, self.steps = max(0, self.place + 2 * int(action) - 1), self.steps + 1
        reached = bool(self.place >= self.length[0])
        return self.see(), float(reached), reached, self.steps >= 50, {}


class Curriculum(freewheel.Hook):
    """Longer corridors when the short ones are walked; it trains on some, and is evaluated on all."""

    def on_start(self, run: freewheel.Run) -> None:
        self.longest, self.first_rate, run.contexts = 2, run.learning_rate, [[1.0], [2.0]]

    def on_update(self, run: freewheel.Run, metrics: Any) -> None:
        run.learning_rate = self.first_rate * (1 - 0.9 * run.progress)

    def on_eval(self, run: freewheel.Run, step: int, score: Any) -> None:
        self.longest = min(LONGEST, self.longest + 2)
        run.contexts = [[float(length)] for length in range(1, self.longest + 1)]
        run.log("my/longest", self.longest)
        if score.mean == 1.0:
            run.stop("every corridor is walked")


if __name__ == "__main__":
    every = [[float(length)] for length in range(1, LONGEST + 1)]
    done = freewheel.train(Corridor, context=every, steps=40_000, evals=20, seed=1, hooks=[Curriculum()])
    print(done.summary["ended"], "after", done.summary["env_steps"], "steps")
