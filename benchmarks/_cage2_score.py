"""Greedy episodes of a run on the real simulator, or on the fast world: one process, one line of JSON."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import closing
from dataclasses import replace

from freewheel.envs.gym import GymConfig
from freewheel.run.evaluation.episodes import evaluate
from freewheel.run.saved import open_run
from freewheel_cage2 import family
from freewheel_cage2.scenario import STEPS


def main() -> None:
    """Order: run, which, world (real or fast), red_agent, episodes, seed, lanes."""
    order = json.loads(sys.argv[1])
    run = open_run(order["run"])
    actor, _ = run.actor(order["which"])
    world = run.config.env
    assert isinstance(world, GymConfig)
    args = {**world.args, "red_agent": order["red_agent"]}
    if order["world"] == "real":
        world = family.real(GymConfig(family.REAL, max_episode_steps=STEPS))
    with closing(replace(world, args=args).make(range(order["lanes"]))) as env:
        gc.collect()
        gc.freeze()
        score = evaluate(env, actor, order["episodes"], order["seed"])
    print(json.dumps({"returns": score.returns}))


if __name__ == "__main__":
    main()
