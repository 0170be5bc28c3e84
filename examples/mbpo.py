"""Asynchronous model-based RL (v1): environment, model and agent, each on its own clock; and where the learner's time went."""

from __future__ import annotations

import freewheel

if __name__ == "__main__":
    result = freewheel.train(  # mode="batch" is v2: the next batch of rows is collected while this one is learned from
        "CartPole-v1", preset="cartpole-mbpo", mode="continuous", workers=1, steps=1_200, evals=0, seed=1, quiet=True
    )
    score, shares = freewheel.score(result, which="latest"), result.summary["shares"]["learner"]
    spent = ", ".join(f"{kind} {shares[kind]:.0%}" for kind in ("update", "rollout", "wait-model", "wait-data"))
    print(f"return {score.mean:.0f} after {result.summary['env_steps']:,} real steps; learner: {spent}")
