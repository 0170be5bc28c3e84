"""The same environments, algorithm and seed under three ways of collecting: only the mode differs."""

from __future__ import annotations

import freewheel

UNEVEN = {"mean": 0.005, "sigma": 1.0}  # seconds of a step, and how much they differ

if __name__ == "__main__":
    for mode in ("sequential", "lockstep", "continuous"):
        done = freewheel.train(
            "freewheel/Straggler-v0", mode=mode, num_envs=8, num_steps_per_env=32, minutes=0.1, evals=0, seed=1, env_args=UNEVEN,
            quiet=True,
        )  # fmt: skip
        waiting = done.summary["shares"]
        print(
            f"{mode:10}  {done.summary['steps_per_s']:6.0f} env steps/s   learner: {waiting['learner']['wait-data']:.0%} waiting"
        )
