"""SAC on continuous actions, scored on seeds that it was not chosen on."""

from __future__ import annotations

import freewheel

if __name__ == "__main__":
    result = freewheel.train("Pendulum-v1", algo="sac", mode="continuous", workers=1, num_envs=1, steps=6_000, seed=1)
    score = freewheel.score(result, episodes=20)
    print(f"{score.mean:.0f} ± {score.spread:.0f} over {len(score.returns)} episodes; random actions earn about -1,200")
