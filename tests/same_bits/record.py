"""The runs whose weights are compared with those of the first release: `python tests/same_bits/record.py FOLDER` records them."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

import freewheel

NETWORK = {"hidden": [32, 32]}
#: Of the first release: observations as they are, and a temperature that begins at 1.
AS_IT_IS = {"policy": {**NETWORK, "normalize_obs": False}}
REPLAY: dict[str, Any] = {"learning_starts": 64, "batch": 64, "first_temperature": 1.0}
MODEL: dict[str, Any] = {
    **REPLAY, "updates_per_row": 2, "rollouts_per_row": 4, "model_every": 64, "members": 3, "elites": 2,
    "model_hidden": [32, 32], "max_epochs": 5, "clock": "serial", "rollout_schedule": [0, 0, 1, 1], "critic_norm": False,
}  # fmt: skip
ALGORITHMS: Mapping[str, dict[str, Any]] = {
    "ppo-CartPole-v1": {"env": "CartPole-v1", "steps": 1024, "num_steps_per_env": 64, "ppo": {"minibatch": 64}},
    "ppo-Pendulum-v1": {
        "env": "Pendulum-v1", "steps": 1024, "num_steps_per_env": 64, "ppo": {"minibatch": 64, "reward_scale": "returns"},
        "policy": {**NETWORK, "normalize_obs": True},
    },
    "sac-Pendulum-v1": {"env": "Pendulum-v1", "algo": "sac", "steps": 256, "sac": REPLAY, **AS_IT_IS},
    "mbpo-Pendulum-v1": {"env": "Pendulum-v1", "algo": "mbpo", "steps": 192, "mbpo": MODEL, **AS_IT_IS},
}  # fmt: skip
MODES: Mapping[str, dict[str, Any]] = {
    "sequential": {"num_envs": 4},
    "lockstep": {"num_envs": 4, "placement": "inline"},
    "batch": {"num_envs": 4, "workers": 2},
}
CASES = [f"{algorithm}-{mode}" for algorithm in ALGORITHMS for mode in MODES]
#: Every algorithm and every mode.
PAIRS = ("ppo-CartPole-v1-lockstep", "ppo-Pendulum-v1-batch", "sac-Pendulum-v1-sequential", "mbpo-Pendulum-v1-lockstep")


def weights(case: str) -> dict[str, Any]:
    """The final weights of this run."""
    algorithm, _, mode = case.rpartition("-")
    with tempfile.TemporaryDirectory() as folder:
        options = {"policy": NETWORK, **ALGORITHMS[algorithm], **MODES[mode]}
        options |= {"mode": mode, "seed": 7, "evals": 0, "runs_dir": folder, "run": "run"}
        result = freewheel.train(options.pop("env"), quiet=True, **options)
        return load_file(result.path / "checkpoints" / "latest" / "weights.safetensors")


def arithmetic() -> str:
    """A fingerprint of how this machine rounds: libraries choose their kernels by the processor."""
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((2, 64, 64), np.float32)
    x, y = torch.from_numpy(left), torch.from_numpy(right)
    parts = [left @ right, np.tanh(left), np.exp(right), (x @ y).numpy(), torch.tanh(x).numpy(), torch.exp(y).numpy()]
    digest = hashlib.sha256(f"{np.__version__} {torch.__version__}".encode())
    for part in parts:
        digest.update(part.tobytes())
    return digest.hexdigest()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        save_file(weights(case), folder / f"{case}.safetensors", metadata={"arithmetic": arithmetic()})
        sys.stdout.write(f"{case}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
