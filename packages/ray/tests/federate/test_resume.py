"""A resumed federation sends its sites the options that it began with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freewheel.config import resolve
from freewheel.learn.spec import POLICY
from freewheel.run.checkpoints import checkpoint
from freewheel_ray.federate import resume
from freewheel_ray.federate.federation import Federation
from freewheel_ray.federate.options import FEDERATION, FederateOptions
from freewheel_ray.federate.run_dir import AVERAGE
from tests.support.runs import train


@pytest.mark.parametrize("algo", ["sac", "ppo"])
def test_sites_get_what_was_settled_for_defaults(algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This federation began before defaults changed: it does not normalise observations, and its temperature begins at 1."""
    settled: dict[str, Any] = {"sac": {"first_temperature": 1.0, "learning_starts": 60}} if algo == "sac" else {}
    policy = {"hidden": [8], "normalize_obs": False}
    path = train(tmp_path, "CartPole-v1", algo=algo, steps=64, evals=0, run="f", policy=policy, **settled).path
    learned = {f"{POLICY}{name}": value for name, value in checkpoint.load(path / "checkpoints").params.items()}
    (path / AVERAGE).write_bytes(checkpoint.encode_arrays(learned))
    words = ["--env=CartPole-v1", f"--algo={algo}", "--steps=64"]
    named = {"plain": words, "own": [*words, "--normalize-obs", "true"]}
    sites = {name: {"name": name, "words": given, "steps": 64, "place": {}} for name, given in named.items()}
    about = {"rounds": 4, "round": 2, "env_steps": 64, "wall_s": 1.0, "address": None, "trust": True}
    options = vars(FederateOptions(federate=4))
    (path / FEDERATION).write_text(json.dumps({**about, "options": options, "sites": sites}))
    found: list[Federation] = []
    monkeypatch.setattr(resume, "train", lambda federation, _: found.append(federation))
    resume.resume(path, trust=True)
    plain, other = (resolve.from_argv(site.words) for site in found[0].sites)
    assert (plain.policy.normalize_obs, other.policy.normalize_obs) == (False, True)
    assert getattr(plain.learner, "first_temperature", 1.0) == getattr(other.learner, "first_temperature", 1.0) == 1.0
