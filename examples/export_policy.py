"""Leave Freewheel behind: a trained policy as weights and some ten lines of numpy, and the same actions."""

from __future__ import annotations

import runpy
import subprocess
import sys

import numpy as np

import freewheel

if __name__ == "__main__":
    result = freewheel.train("CartPole-v1", steps=30_000, seed=1)
    subprocess.run([sys.executable, "-m", "freewheel", "export", str(result.path), "--out", "cartpole"], check=True)
    predict = runpy.run_path("cartpole/predict.py")["predict"]  # it needs numpy and safetensors alone

    observations = np.random.default_rng(0).uniform(-0.2, 0.2, (5, 4)).astype(np.float32)
    ours, _ = freewheel.load(result).predict(observations)
    print("with Freewheel", ours.tolist(), "without", predict(observations).tolist())
