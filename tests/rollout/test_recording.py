"""What is kept of the episodes under way, against a plain list of everything that was ever played."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.core import NO_CONTEXT, NDArray, Transitions
from freewheel.rollout import recording as module
from freewheel.rollout.recording import UNKNOWN, EpisodeRecording


def rows(rng: np.random.Generator, steps: int, lanes: int, over: float = 0.2, bad: float = 0.05) -> Transitions:
    flags = [rng.random((steps, lanes)) < share for share in (over, over / 2, 1 - bad)]
    return Transitions(
        obs=rng.normal(size=(steps, lanes, 2)),
        action=rng.integers(9, size=(steps, lanes)),
        log_prob=np.zeros((steps, lanes), np.float32),
        reward=rng.normal(size=(steps, lanes)).astype(np.float32),
        terminated=flags[0],
        truncated=flags[1],
        next_obs=rng.normal(size=(steps, lanes, 2)).astype(np.float32),
        valid=flags[2],
    )


def add(recording: EpisodeRecording, data: Transitions) -> None:
    recording.add(data, ends=bool((data.terminated | data.truncated | ~data.valid).any()))


def of_lane(everything: list[Transitions], lane: int) -> tuple[list[int], float, NDArray]:
    """The actions since the lane's last end, the sum of their rewards, what was seen last."""
    actions: list[int] = []
    total = 0.0
    for data in everything:
        for t in range(len(data.valid)):
            actions.append(int(data.action[t, lane]))
            total += float(data.reward[t, lane])
            if data.terminated[t, lane] or data.truncated[t, lane] or not data.valid[t, lane]:
                actions, total = [], 0.0
    return actions, total, everything[-1].next_obs[-1, lane]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(0, 99), st.integers(0, 12))
def test_it_has_what_was_played_since_each_episode_began(lanes: int, sizes: list[int], seed: int, cut: int) -> None:
    rng, everything, recording = np.random.default_rng(seed), list[Transitions](), EpisodeRecording(lanes)
    for number, steps in enumerate(sizes):
        if number == cut:  # carried over by its state, perhaps before anything came
            state, recording = recording.state(), EpisodeRecording(lanes)
            recording.restore(state)
        everything.append(rows(rng, steps, lanes))
        add(recording, everything[-1])
    found = recording.played([NO_CONTEXT] * lanes)
    for lane in range(lanes):
        actions, total, obs = of_lane(everything, lane)
        one = found[lane]
        assert recording.steps[lane] == len(actions)
        if one is None:
            assert not actions
        else:
            assert (one.action.tolist(), one.ret, one.obs.tobytes()) == (actions, total, obs.tobytes())


def test_many_short_chunks_are_few_arrays() -> None:
    recording, rng = EpisodeRecording(2), np.random.default_rng(0)
    data = [rows(rng, 1, 2, over=0.0, bad=0.0) for _ in range(1000)]
    for one in data:
        add(recording, one)
    assert len(recording._pieces) < 1000 / module.SMALL + module.SMALL
    found = recording.played([NO_CONTEXT] * 2)[1]
    assert found is not None
    assert found.action.tolist() == [part.action[0, 1] for part in data]


def test_an_episode_that_is_too_long_is_given_up_and_the_other_lane_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STEPS", 50)
    recording, rng = EpisodeRecording(2), np.random.default_rng(0)
    for number in range(40):
        data = rows(rng, 5, 2, over=0.0, bad=0.0)
        if number == 35:
            data.terminated[2, 1] = True
        add(recording, data)
    assert recording.steps.tolist() == [UNKNOWN, 2 + 5 * 4]
    assert len(recording._pieces) <= 2 * 50 / 5 + 2
    data.truncated[:] = [[False, False]] * 4 + [[True, False]]
    add(recording, data)
    assert recording.steps.tolist() == [0, 27], "the next one can be recorded again"


def test_memory_is_bounded_by_giving_up_the_longest_episode() -> None:
    each = 5 * 2 * (8 + 4)  # bytes of a chunk
    recording, rng = EpisodeRecording(2, most_bytes=10 * each), np.random.default_rng(0)
    for number in range(30):
        data = rows(rng, 5, 2, over=0.0, bad=0.0)
        data.terminated[0, 1] = number == 25
        add(recording, data)
        assert recording._bytes <= 11 * each
    assert recording.steps.tolist() == [UNKNOWN, 4 + 5 * 4]


def test_what_is_missing_makes_the_episodes_under_way_unknown() -> None:
    recording, rng = EpisodeRecording(2), np.random.default_rng(0)
    add(recording, rows(rng, 4, 2, over=0.0, bad=0.0))
    recording.forget()
    data = rows(rng, 4, 2, over=0.0, bad=0.0)
    data.terminated[1, 0] = True
    add(recording, data)
    assert recording.steps.tolist() == [2, UNKNOWN]
    assert recording.played([NO_CONTEXT] * 2)[1] is None
    recording.restart(1, 3)
    assert recording.steps.tolist() == [2, 3]
