"""CAGE Challenge 2: whole episodes, taken as they end, on our world, which plays like the real simulator and is much faster."""

from __future__ import annotations

import freewheel

if __name__ == "__main__":
    result = freewheel.train(  # the real simulator: env="cyborg:Scenario2", workers=8 instead of num_envs
        "freewheel/Cage2-v0",
        mode="episodes",
        env_args={"red_agent": "B_lineAgent"},
        num_envs=100,
        episodes=2_000,
        episodes_per_update=100,
        evals=0,
        seed=1,
    )
    score = freewheel.score(result, which="latest", episodes=100)
    print(
        f"return {score.mean:.0f} ± {score.spread:.0f} over {len(score.returns)} games; a sleeping defender has -1,134"
    )
