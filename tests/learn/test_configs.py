"""Configs of algorithms refuse what cannot work, declare what a run has to know, and stay light."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from freewheel.core import ActionSpec, BatchSpec, EnvSpec, Slice
from freewheel.errors import UsageError
from freewheel.learn.mbpo.config import MBPOConfig
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.sac.config import SACConfig, first_temperature
from freewheel.learn.spec import ALGORITHMS, LearnerSpec, ReplayConfig
from freewheel.policies.spec import PolicySpec


@pytest.mark.parametrize(
    ("names", "values", "complaint"),
    [
        ("lr epochs minibatch clip max_grad_norm rho_bar c_bar target_kl", (0, -1), "must be positive"),
        ("lr target_kl", (math.nan,), "must be positive"),
        ("gamma gae_lambda", (-0.1, 1.1, math.nan), "must lie in 0..1"),
        ("entropy value", (-0.1, math.nan), "must not be negative"),
    ],
)
def test_settings_that_cannot_work_are_refused(names: str, values: tuple[float, ...], complaint: str) -> None:
    for name, value in itertools.product(names.split(), values):
        with pytest.raises(UsageError, match=rf"^--ppo\.{name.replace('_', '-')} {complaint}.*{value}"):
            PPOConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "needed"), [({"priority_alpha": 0.5}, "td"), ({"priority_beta": 0.4}, "td"), ({"recency": 2.0}, "recent")]
)
def test_settings_of_another_way_to_draw_are_refused(given: dict[str, float], needed: Any) -> None:
    (name,) = given
    for kind in (SACConfig, MBPOConfig):
        with pytest.raises(
            UsageError, match=rf"^{kind.name}\.{name} has no effect with .* uniform: add .* {needed}, or"
        ):
            kind(**given)  # type: ignore[arg-type]
        assert getattr(kind(priority=needed, **given), name) == given[name]  # type: ignore[arg-type]


def test_what_an_update_learns_from_is_told() -> None:
    policy = PolicySpec(2, "float32", ((0, 2),), ((0, 2),), (), None, "squashed", 3, (4,), "tanh", 0.0, "")
    spec = LearnerSpec(policy=policy, batch=BatchSpec(4, 2), seed=0)
    assert SACConfig().describe(spec).endswith("MB)")
    assert SACConfig(priority="td", n_step=3).describe(spec).endswith(", large errors more often, returns over 3 steps")
    each = [need.each for need in SACConfig(priority="td", n_step=3).needs(spec) if need.what.startswith("priorities")]
    assert each == [16]
    described = MBPOConfig(predict="affine", priority="recent").describe(spec)
    assert "new ones more often; 7 models of 200 - 200 - 200 - 200 and 12 effects of an action" in described


def test_a_temperature_begins_at_half_a_usual_reward() -> None:
    """The median decides, the mean where most rewards are 0, within 0.01 and 1; what is not finite never does."""
    steps, sparse, nothing, wrong = [-0.1] * 9 + [5.0], [0.0] * 9 + [1.0], [0.0], [math.nan, 0.4]
    for given, begins in ((steps, 0.05), (sparse, 0.05), (nothing, 0.1), ([-9.0], 1), ([1e-6], 0.01), (wrong, 0.2)):
        rewards = np.array(given)
        assert first_temperature(rewards) == pytest.approx(begins)
        assert f"the temperature begins at {begins}" in SACConfig().about_rewards(rewards)
        assert f"would begin at {begins}, not at 3" in SACConfig(first_temperature=3).about_rewards(rewards)
        fixed = SACConfig(temperature=3, first_temperature=1).about_rewards(rewards)
        assert fixed.endswith(f": a learned temperature would begin at {begins}, this one stays at 3")


class Other(ReplayConfig):
    def build(self, spec: LearnerSpec) -> Any: ...


def test_only_sac_and_mbpo_have_normalised_observations_where_nothing_is_given() -> None:
    """Another algorithm with a replay buffer keeps what it was written for."""
    world = EnvSpec("toy", 2, 3, "float32", (Slice("policy", 0, 3, (3,)),), ActionSpec("discrete", 2))
    for config, normalised in ((Other(), False), (SACConfig(), True), (MBPOConfig(), True)):
        assert config.usual(world, None) == {"policy.head": "categorical", "policy.normalize_obs": normalised}


def test_the_edges_are_allowed() -> None:
    PPOConfig(gamma=0, gae_lambda=1, entropy=0, value=0, target_kl=None)
    PPOConfig(gamma=1, gae_lambda=0, target_kl=0.01)


def test_every_algorithm_declares_what_a_run_has_to_know() -> None:
    declared = {}
    for name, entry in ALGORITHMS.entries.items():
        config = entry.config()
        declared[name] = config.on_policy, config.executor, config.publish_every, "policy" in entry.defaults
    assert declared == {
        "ppo": (True, "serial", None, False),
        "sac": (False, "serial", None, True),
        "mbpo": (False, "auto", None, True),
    }
    assert PPOConfig().schedules_need_steps == ()
    assert PPOConfig(clip_schedule="linear").schedules_need_steps == ("clip_schedule",)
