"""Compare our environment with the real simulator: the returns of simple defenders, and the events in their games.

The real one's games were recorded once (`python -m benchmarks.cage2_record`); the first of each kind are played again here, which
must give the recording to the last count. Ours draws its own dice, so it agrees as one sample agrees with another.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from statistics import NormalDist

import numpy as np
import pytest

from freewheel.core import NDArray
from freewheel_cage2.agents import defender
from freewheel_cage2.env import Cage2Vector
from packages.cage2.tests.support.cage2_games import DEFENDERS, REDS, STEPS, Games, Record, play_real, record, stored
from tests.support.places import LONG

PAIRS = [(name, red) for name in DEFENDERS for red in REDS]
LIVE, EPISODES, SEED = 30 if LONG else 4, 1000, 20_000
LEVEL = 0.01  # probability that one of a family of comparisons fails by chance
BY_EPISODE = (
    "user", "root", "scan", "exploit", "believed_unknown", "believed_user", "believed_privileged", "decoys", "down",
    "red", "blue",
)  # fmt: skip
BY_STEP = ("held_by_step", "root_by_step")


def recorded(name: str, red: str) -> Record:
    with np.load(stored(name, red), allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def play_fast(name: str, red: str, episodes: int, seed: int) -> Record:
    """Play games of our environment with the same defender, all at once."""
    world = Cage2Vector(episodes, red, max_episode_steps=STEPS)
    blue = defender(name, episodes, seed)
    obs, _ = world.reset(seed=seed)
    seen, actions, rewards, turns, truths = [obs], [], [], [], [truth(world)]
    for _ in range(STEPS):
        actions.append(blue.act(obs))
        obs, reward, *_ = world.step(actions[-1])
        assert world.turn is not None
        seen.append(obs)
        rewards.append(reward)
        turns.append((world.turn.red_kind, world.turn.red_success, world.turn.blue_success))
        truths.append(truth(world))
    red_kind, red_success, blue_success = (np.stack(part, axis=1) for part in zip(*turns, strict=True))
    access, decoys, otservice = (np.stack(part, axis=1) for part in zip(*truths, strict=True))
    shown, acted, earned = (np.stack(part, axis=1) for part in (seen, actions, rewards))
    seeds = np.arange(seed, seed + episodes)
    return record(Games(seeds, shown, acted, earned, red_kind, red_success, blue_success, access, decoys, otservice))


def truth(world: Cage2Vector) -> tuple[NDArray, NDArray, NDArray]:
    """[B, 13] access, [B, 13] decoys, [B] whether OTService runs."""
    nets = world.nets
    access = nets.among(nets.held).astype(np.int8) + nets.among(nets.rooted)
    return access, nets.decoys.reshape(access.shape).copy(), nets.ot_up.copy()


def welch(ours: NDArray, theirs: NDArray) -> NDArray:
    """Return [...] the distance of the means over the first axis in deviations; 0 if both are constant and equal."""
    gap = ours.mean(axis=0) - theirs.mean(axis=0)
    error = np.sqrt(ours.var(axis=0, ddof=1) / len(ours) + theirs.var(axis=0, ddof=1) / len(theirs))
    return np.where(gap == 0, 0.0, np.abs(gap) / np.maximum(error, 1e-12))


def smirnov(ours: NDArray, theirs: NDArray) -> float:
    """Return the largest distance of the two distribution functions in units of its scale."""
    values = np.concatenate([ours, theirs])
    shares = [np.searchsorted(np.sort(sample), values, side="right") / len(sample) for sample in (ours, theirs)]
    scale = math.sqrt((len(ours) + len(theirs)) / (len(ours) * len(theirs)))
    return float(np.abs(shares[0] - shares[1]).max()) / scale


def proportions(ours: NDArray, theirs: NDArray, games: int, others: int) -> NDArray:
    """Return [...] the distance of two shares in deviations."""
    pooled = (ours * games + theirs * others) / (games + others)
    error = np.sqrt(pooled * (1 - pooled) * (1 / games + 1 / others))
    return np.where(ours == theirs, 0.0, np.abs(ours - theirs) / np.maximum(error, 1e-12))


def returns(games: Record) -> NDArray:
    return np.asarray(games["reward"].sum(axis=1, dtype=np.int64) / 10)


def events(ours: Record, theirs: Record) -> Iterator[tuple[str, NDArray]]:
    """Return the distances of all quantities except returns, by name, in deviations."""
    for key in BY_EPISODE:
        yield key, welch(ours[key].astype(float), theirs[key].astype(float))
    yield "reward by step", welch(ours["reward"].astype(float), theirs["reward"].astype(float))
    for key in BY_STEP:
        yield key, proportions(ours[key], theirs[key], len(ours["seed"]), len(theirs["seed"]))


def unlike_returns(ours: Record, theirs: Record, comparisons: int) -> list[str]:
    level = LEVEL / comparisons
    distances = {
        "mean": (float(welch(returns(ours), returns(theirs))), NormalDist().inv_cdf(1 - level / 2)),
        "distribution": (smirnov(returns(ours), returns(theirs)), math.sqrt(-math.log(level / 2) / 2)),
    }
    means = f"{returns(ours).mean():.2f} and {returns(theirs).mean():.2f}"
    return [f"{what}: {far:.2f} > {most:.2f} ({means})" for what, (far, most) in distances.items() if far > most]


def unlike_events(ours: Record, theirs: Record, pairs: int) -> list[str]:
    found = dict(events(ours, theirs))
    most = NormalDist().inv_cdf(1 - LEVEL / (pairs * sum(far.size for far in found.values())) / 2)
    return [
        f"{key}{np.array(place).tolist()}: {far[tuple(place)]:.2f} > {most:.2f}"
        for key, far in found.items()
        for place in np.argwhere(far > most)
    ]


@pytest.mark.system
@pytest.mark.parametrize(("name", "red"), PAIRS)
def test_the_recording_is_the_real_simulators(name: str, red: str) -> None:
    """Play its first games now."""
    kept, played = recorded(name, red), record(play_real(name, red, range(LIVE)))
    gc.unfreeze()  # undoes the freeze in play_real
    assert len(kept["seed"]) == EPISODES
    for key in ("seed", "reward", *BY_EPISODE):
        assert np.array_equal(kept[key][:LIVE], played[key]), key


@pytest.fixture(scope="module")
def fast() -> Mapping[tuple[str, str], Record]:
    return {pair: play_fast(*pair, EPISODES, SEED) for pair in PAIRS}


@pytest.mark.parametrize(("name", "red"), PAIRS)
def test_returns_and_events_agree(fast: Mapping[tuple[str, str], Record], name: str, red: str) -> None:
    ours, theirs = fast[name, red], recorded(name, red)
    assert unlike_returns(ours, theirs, 2 * len(PAIRS)) == []
    assert unlike_events(ours, theirs, len(PAIRS)) == []


@pytest.mark.parametrize("key", BY_EPISODE)
def test_an_event_that_is_a_tenth_rarer_is_noticed(key: str) -> None:
    found = []
    for pair in PAIRS:
        kept = recorded(*pair)
        found += unlike_events(kept | {key: np.random.default_rng(0).binomial(kept[key], 0.9)}, kept, len(PAIRS))
    assert found
    assert all(text.startswith(f"{key}[") for text in found)


def test_a_reward_that_is_a_tenth_off_is_noticed() -> None:
    for name, red in PAIRS:
        kept = recorded(name, red)
        off = kept | {"reward": np.rint(kept["reward"] * 0.9).astype(np.int16)}
        assert len(unlike_returns(off, kept, 2 * len(PAIRS))) == 2 or name == "random"


def test_another_red_is_noticed() -> None:
    ours, theirs = recorded("random", "B_lineAgent"), recorded("random", "RedMeanderAgent")
    assert len(unlike_returns(ours, theirs, 2 * len(PAIRS))) == 2
    late = ours | {"held_by_step": np.roll(ours["held_by_step"], 1, axis=0)}  # red is one step late
    assert any(text.startswith("held_by_step") for text in unlike_events(late, ours, len(PAIRS)))


def test_the_arithmetic() -> None:
    ours, theirs = np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 4.0, 6.0])
    assert float(welch(ours, theirs)) == pytest.approx(1.5 / math.sqrt(5 / 12 + 4 / 3))
    assert smirnov(ours, theirs) == pytest.approx(5 / 12 / math.sqrt(7 / 12))
    assert float(proportions(np.array(0.5), np.array(0.25), 4, 8)) == pytest.approx(0.25 / math.sqrt(2 / 9 * 3 / 8))
    assert float(welch(np.ones(3), np.ones(4))) == 0.0
