"""Continuous actions with the defaults for them, scored on seeds that the weights were not chosen on."""

from __future__ import annotations

import freewheel

if __name__ == "__main__":
    result = freewheel.train(
        "Pendulum-v1", steps=60_000, seed=1
    )  # algo="sac" needs a tenth of the steps, and more time
    score = freewheel.score(result, episodes=20)
    print(f"{score.mean:.0f} ± {score.spread:.0f} over {len(score.returns)} episodes; random actions earn about -1,200")
