"""A tolerant loop: a failure is a gap and a report, the lane goes on with its next seed, its neighbours never notice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from freewheel.core import Env, NDArray
from freewheel.envs.gym import GymConfig, GymLoop
from freewheel.errors import EnvError
from freewheel.rollout.tolerance import FAILURES, GOOD_STEPS, TRUSTED_FAILURES
from freewheel.seeding import training_episodes
from freewheel.testing.conformance import check_env
from tests.support.worlds import Raises, Toy

LANES = range(4, 7)
STREAMS = [training_episodes(0, lane) for lane in LANES]
SICK = 1  # the lane that fails, of LANES
ENDS = 5  # steps of an episode

#: (episode of the sick lane, step; 0: in reset) -> what goes wrong
Faults = Mapping[tuple[int, int], str]

CAUSES = {
    "raise": "env_error",
    **dict.fromkeys(("shape", "none", "tuple", "no count", "no reward", "nan and no reward"), "shape"),
    **dict.fromkeys(("nan", "inf", "-inf", "nan reward", "inf reward", "nan and nan reward"), "nan"),
}


class Ill(Toy):
    """Shows noise of its seed, pays 1 + the action, and does what `faults` say for its seed and step."""

    def __init__(self, faults: Mapping[tuple[int, int], str], length: int = ENDS) -> None:
        super().__init__(length, "terminated")
        self.observation_space: Any = Box(-9.0, 9.0, (3,), np.float32)
        self.action_space = Discrete(4)
        self.faults = faults
        self.calls = 0

    def observe(self) -> NDArray:
        return self.np_random.normal(size=3).astype(np.float32)

    def judge(self, action: Any) -> float:
        return 1.0 + float(action)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.calls += 1
        return self.spoilt(super().reset(seed=seed, options=options))

    def step(self, action: Any) -> Any:
        self.calls += 1
        return self.spoilt(super().step(action))

    def spoilt(self, answer: tuple[Any, ...]) -> Any:
        observation, *rest = answer
        fault = self.faults.get((self.seed, self.count))
        if fault == "raise":
            raise ValueError("boom")
        for part in (fault or "").split(" and "):
            observation = {
                "shape": observation[:1],
                "none": None,
                "nan": observation * np.float32(np.nan),
                "inf": np.where([False, True, False], np.float32(np.inf), observation),
                "-inf": np.array([np.inf, 0, -np.inf], np.float32),
            }.get(part, observation)
            if part.endswith("reward"):
                rest[0] = {"nan reward": float("nan"), "inf reward": float("inf"), "no reward": None}[part]
        if fault == "no count":
            rest[1:] = True, False, {}
        return (observation, *rest[:-1]) if fault == "tuple" else (observation, *rest)


def world(faults: Faults, *, length: int = ENDS, fault_tolerant: bool = True) -> GymLoop:
    """Three lanes of which the second one is ill."""
    by_seed = {(STREAMS[SICK].seed(k), step): fault for (k, step), fault in faults.items()}
    config = GymConfig("Ill", factory=lambda: Ill(by_seed, length), measures=("count",))
    env = config.make(LANES, fault_tolerant=fault_tolerant)
    assert isinstance(env, GymLoop)
    return env


class Row:
    """What a step said and what was acted on next, kept."""

    def __init__(self, env: Env, action: NDArray) -> None:
        step = env.step(action)
        fields = ("reward", "terminated", "truncated", "next_obs", "valid")
        self.fields = {name: getattr(step, name).copy() for name in fields}
        self.failures = step.failures
        over = step.terminated | step.truncated
        self.measures = np.where(over[:, None], step.measures, 0)
        self.obs = (env.autoreset() if over.any() or step.failures else step.next_obs).copy()

    @property
    def valid(self) -> list[bool]:
        valid: list[bool] = self.fields["valid"].tolist()
        return valid

    def of(self, lanes: Sequence[int]) -> list[bytes]:
        """All that concerns these lanes, to the last bit."""
        return [values[lanes].tobytes() for values in (*self.fields.values(), self.measures, self.obs)]


def play(env: Env, steps: int) -> list[Row]:
    env.reset(STREAMS)
    rng = np.random.default_rng(1)
    return [Row(env, rng.integers(4, size=len(LANES))) for _ in range(steps)]


def starts(number: int) -> list[float]:
    """The first observation of the sick lane's episode of this number."""
    first: NDArray = Ill({}).reset(seed=STREAMS[SICK].seed(number))[0]
    return [float(value) for value in first]


def told(rows: Sequence[Row]) -> list[tuple[int, int, str, bool]]:
    """Row, lane, cause and whether in a reset, of all failures."""
    return [(t, f.lane, f.cause, f.in_reset) for t, row in enumerate(rows) for f in row.failures]


def test_without_failures_it_conforms_and_says_what_any_loop_says() -> None:
    check_env(lambda lanes: GymConfig("CartPole-v1").make(lanes, fault_tolerant=True))
    ours, plain = (play(world({}, fault_tolerant=tolerant), 30) for tolerant in (True, False))
    assert [row.of([0, 1, 2]) for row in ours] == [row.of([0, 1, 2]) for row in plain]


@pytest.mark.parametrize("fault", CAUSES)
def test_a_failure_in_a_step_is_a_gap_and_the_next_episode_begins(fault: str) -> None:
    rows = play(world({(1, 3): fault}), 12)
    t = ENDS + 2
    assert told(rows) == [(t, SICK, CAUSES[fault], False)]
    assert [row.valid for row in rows] == [[True, k != t, True] for k in range(12)]
    gap = rows[t]
    assert {name: values[SICK].tolist() for name, values in gap.fields.items()} == {
        "reward": 0.0, "terminated": False, "truncated": False, "next_obs": [0.0] * 3, "valid": False,
    }  # fmt: skip
    assert gap.obs[SICK].tolist() == starts(2)
    assert [bool(row.fields["terminated"][SICK]) for row in rows[t + 1 :]] == [False] * 4, "episode 2 has not ended yet"
    report = gap.failures[0].report
    assert report.startswith("lane 5 of Ill ")
    assert f"(episode 1, seed {STREAMS[SICK].seed(1)}, step 3, last action " in report


@pytest.mark.parametrize(("fault", "episode"), [(one, k) for one in ("raise", "shape", "none", "inf") for k in (0, 2)])
def test_a_failure_in_a_reset_is_reported_with_the_next_step_and_loses_no_row(fault: str, episode: int) -> None:
    faults = {(episode, 0): fault}
    assert world(faults).reset(STREAMS)[SICK].tolist() == starts(0 if episode else 1)
    rows = play(world(faults), 12)
    t = episode * ENDS
    assert told(rows) == [(t, SICK, CAUSES[fault], True)]
    assert all(row.valid == [True] * 3 for row in rows)
    assert episode == 0 or rows[t - 1].obs[SICK].tolist() == starts(episode + 1)
    report = rows[t].failures[0].report
    assert report.startswith("lane 5 of Ill ")
    assert f"(episode {episode}, seed {STREAMS[SICK].seed(episode)}, in reset)" in report


def test_what_is_said_of_each_cause() -> None:
    where = f"(episode 0, seed {STREAMS[SICK].seed(0)}, step 1, last action"
    for fault, text in {
        "raise": f"lane 5 of Ill raised ValueError: boom {where}",
        "shape": f"lane 5 of Ill gave a wrong observation in step(): obs: expected shape (3,), got (1,) {where}",
        "no count": f"lane 5 of Ill gave a wrong answer in step(): no 'count' in info {where}",
        "nan": f"lane 5 of Ill gave an observation that is not finite: [nan nan nan] {where}",
        "inf reward": f"lane 5 of Ill gave a reward that is not finite: inf {where}",
    }.items():
        (row,) = play(world({(0, 1): fault}), 1)
        assert row.failures[0].report.startswith(text)
        assert ("Traceback" in row.failures[0].report) == (fault == "raise")


@pytest.mark.parametrize("fault", ["nan", "nan reward"])
def test_an_end_that_is_not_finite_is_no_end_and_is_followed_by_one_episode(fault: str) -> None:
    rows = play(world({(0, ENDS): fault}), 2 * ENDS)
    assert told(rows) == [(ENDS - 1, SICK, "nan", False)]
    assert not rows[ENDS - 1].fields["terminated"][SICK]
    assert [rows[k * ENDS - 1].obs[SICK].tolist() for k in (1, 2)] == [starts(1), starts(2)]


def test_several_failures_are_told_in_the_order_they_happened() -> None:
    rows = play(world({(0, 4): "raise", (1, 0): "shape", (2, 1): "nan"}, length=99), 5)
    expected = [(3, "env_error", False), (4, "shape", True), (4, "nan", False), (4, "quarantine", False)]
    assert told(rows) == [(t, SICK, cause, in_reset) for t, cause, in_reset in expected]
    assert not rows[4].valid[SICK]


@pytest.mark.parametrize(
    ("fault", "where"),
    [("raise", {(1, 3)}), ("shape", {(0, 0)}), ("nan", {(1, 0)}), ("raise", {(0, 0), (1, 0), (2, 0)})]
    + [(fault, {(k, 2) for k in range(9)}) for fault in ("raise", "shape", "nan", "inf reward")],
)
def test_neighbours_do_not_notice(fault: str, where: set[tuple[int, int]]) -> None:
    well, ill = play(world({}), 40), play(world(dict.fromkeys(where, fault)), 40)
    neighbours = [lane for lane in range(3) if lane != SICK]
    assert [row.of(neighbours) for row in ill] == [row.of(neighbours) for row in well]
    assert [row.of([SICK]) for row in ill] != [row.of([SICK]) for row in well]


def test_a_lane_that_nobody_renews_stays_a_gap() -> None:
    env = world({(0, 2): "raise"})
    env.reset(STREAMS)
    action = np.zeros(3, np.int64)
    assert [len(env.step(action).failures) for _ in range(2)] == [0, 1]
    later = env.step(action)
    assert (later.valid.tolist(), later.failures, later.next_obs[SICK].tolist()) == ([True, False, True], (), [0.0] * 3)
    env.autoreset()
    assert env.step(action).valid.tolist() == [True] * 3


def test_bytes_are_not_asked_whether_they_are_finite_but_rewards_are() -> None:
    class Pixels(Ill):
        def __init__(self) -> None:
            super().__init__({(STREAMS[SICK].seed(0), 2): "nan reward"})
            self.observation_space = Box(0, 255, (3,), np.uint8)

        def observe(self) -> NDArray:
            return self.np_random.integers(256, size=3).astype(np.uint8)

    env = GymConfig("Pixels", factory=Pixels).make(LANES, fault_tolerant=True)
    rows = play(env, 4)
    assert rows[0].obs.dtype == np.uint8
    assert told(rows) == [(1, SICK, "nan", False)]
    assert isinstance(env, GymLoop)
    assert env._tolerant is not None
    assert [values.dtype for values in env._tolerant._floats] == [np.float32]


@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_a_lane_is_given_up_at_its_third_failure_with_few_good_steps_between(fault: str) -> None:
    near = {(k, GOOD_STEPS): fault for k in range(9)}  # nine good steps, then a failure
    rows = play(world(near, length=99), 4 * GOOD_STEPS)
    failures = [(GOOD_STEPS * (k + 1) - 1, SICK, CAUSES[fault], False) for k in range(3)]
    assert told(rows) == [*failures, (3 * GOOD_STEPS - 1, SICK, "quarantine", False)]
    assert [row.valid[SICK] for row in rows[3 * GOOD_STEPS - 1 :]] == [False] * (GOOD_STEPS + 1)
    cause, given_up = rows[3 * GOOD_STEPS - 1].failures
    assert given_up.report == f"lane 5 of Ill was given up after {FAILURES} failures in a row; the last: {cause.report}"
    far = {(k, GOOD_STEPS + 1): fault for k in range(9)}  # ten good steps
    rows = play(world(far, length=99), 9 * (GOOD_STEPS + 1))
    assert [cause for _, _, cause, _ in told(rows)] == [CAUSES[fault]] * 9


@pytest.mark.parametrize(("good", "given_up"), [(GOOD_STEPS - 1, True), (GOOD_STEPS, False)])
def test_failures_in_resets_count_like_any(good: int, given_up: bool) -> None:
    every_other = {(k, 0): "raise" for k in range(1, 12, 2)}  # an episode of `good` steps between two of them
    rows = play(world(every_other, length=good), 5 * good)
    expected = ["env_error"] * 3 + ["quarantine"] if given_up else ["env_error"] * 4
    assert [cause for _, _, cause, _ in told(rows)] == expected
    assert rows[-1].valid == [True, not given_up, True]


def test_good_steps_wipe_the_slate() -> None:
    """Two failures, then ten good steps: from now on it takes ten failures in a row, and nine are not enough."""
    faults = {(0, 1): "raise", (1, 1): "raise", (2, 11): "raise", **{(k, 1): "raise" for k in range(3, 11)}}
    rows = play(world(faults, length=99), 40)
    assert [t for t, *_ in told(rows)] == [0, 1, *range(12, 21)]
    assert rows[-1].valid == [True] * 3
    rows = play(world({**faults, (11, 1): "raise"}, length=99), 40)
    assert [cause for _, _, cause, _ in told(rows)] == ["env_error"] * 12 + ["quarantine"]
    last = next(row for row in rows if row.failures[1:]).failures[1]
    assert f"given up after {TRUSTED_FAILURES} failures in a row" in last.report


@pytest.mark.parametrize("step", [0, 1])
def test_a_lane_that_was_given_up_is_never_called_again(step: int) -> None:
    env = world({(k, step): "raise" for k in range(1, 99)})
    rows = play(env, 12)
    sick = env._lanes[SICK].env
    assert isinstance(sick, Ill)
    calls = sick.calls
    t = ENDS + (2 if step else 0)
    assert [row.valid[SICK] for row in rows] == [k < ENDS for k in range(12)]
    assert [cause for _, _, cause, _ in told(rows)] == ["env_error"] * 3 + ["quarantine"]
    assert told(rows)[-1] == (t, SICK, "quarantine", step == 0)
    assert step or rows[t - 1].obs[SICK].tolist() == [0.0] * 3, "given up where its next episode should have begun"
    for row in rows[t:]:
        assert (row.obs[SICK].tolist(), row.fields["next_obs"][SICK].tolist()) == ([0.0] * 3, [0.0] * 3)
        assert not row.fields["terminated"][SICK]
    later = play(env, 7)  # not even by a reset of all
    assert [row.valid for row in later] == [[True, False, True]] * 7
    assert told(later) == []
    assert sick.calls == calls


def raising(faults: Faults) -> str:
    """Play a single lane until nobody is left, and see that nothing goes any more."""
    stream, action = STREAMS[SICK], np.zeros(1, np.int64)
    by_seed = {(stream.seed(k), step): fault for (k, step), fault in faults.items()}
    env = GymConfig("Ill", factory=lambda: Ill(by_seed)).make(LANES[SICK : SICK + 1], fault_tolerant=True)

    def forever() -> None:
        env.reset([stream])
        while True:
            env.step(action)
            env.autoreset()

    reports = []
    for act in (forever, lambda: env.step(action), env.autoreset, lambda: env.reset([stream])):
        with pytest.raises(EnvError) as caught:
            act()
        assert caught.value.cause == "quarantine"
        reports.append(caught.value.report)
    assert len(set(reports)) == 1
    return reports[0]


@pytest.mark.parametrize(
    ("faults", "place"),
    [
        ({(k, 2): "raise" for k in range(9)}, "episode 2, seed {}, step 2, last action 0"),
        ({(k, 0): "raise" for k in range(9)}, "episode 2, seed {}, in reset"),
        ({(k, 0): "raise" for k in range(1, 9)}, "episode 3, seed {}, in reset"),
    ],
    ids=["step", "first reset", "renew"],
)
def test_no_lane_left_is_the_end(faults: Faults, place: str) -> None:
    seed = STREAMS[SICK].seed(int(place.split()[1].rstrip(",")))
    last = f"lane 5 of Ill raised ValueError: boom ({place.format(seed)})"
    given_up = "lane 5 of Ill was given up after 3 failures in a row"
    assert raising(faults).startswith(f"no lane of Ill is left: {given_up}; the last: {last}\nTraceback")


def test_the_end_comes_with_the_last_of_several_lanes() -> None:
    """Lanes 4 and 5 fail from their first episode on, lane 6 from its second."""
    faults = {(STREAMS[lane].seed(k), 1): "raise" for lane, well in enumerate((0, 0, 1)) for k in range(well, 9)}
    env = GymConfig("Ill", factory=lambda: Ill(faults)).make(LANES, fault_tolerant=True)
    rows = play(env, ENDS + 2)
    assert [row.valid for row in rows] == [[False, False, t < ENDS] for t in range(ENDS + 2)]
    assert [lane for _, lane, cause, _ in told(rows) if cause == "quarantine"] == [0, 1]
    with pytest.raises(EnvError, match=r"^no lane of Ill is left: lane 6 of Ill was given up after 3") as caught:
        Row(env, np.zeros(3, np.int64))
    assert caught.value.cause == "quarantine"


def expected(stream: Any, steps: int, rate: float) -> list[tuple[int, str]]:
    """Row and cause of each failure of a Raises of this rate, by the book."""
    env, number, told, good, running, limit = Raises(rate=rate, length=50), 0, list[tuple[int, str]](), 0, 0, 3
    env.reset(seed=stream.seed(0))
    for t in range(steps):
        try:
            over = env.step(0)[2]
            good += 1
        except ValueError:
            over = True
            running, limit = (1, 10) if good >= 10 else (running + 1, limit)
            good = 0
            told.append((t, "env_error"))
            if running == limit:
                return [*told, (t, "quarantine")]
        if over:
            number += 1
            env.reset(seed=stream.seed(number))
    return told


def test_a_world_that_raises_now_and_then_loses_just_these_rows() -> None:
    rate = 0.05
    env = GymConfig("tests.support.worlds:Raises", {"rate": rate, "length": 50}).make(LANES, fault_tolerant=True)
    rows = play(env, 1500)
    for lane, stream in enumerate(STREAMS):
        failures = [(t, cause) for t, who, cause, _ in told(rows) if who == lane]
        assert failures == expected(stream, 1500, rate)
        last, cause = failures[-1]
        gaps = {t for t, _ in failures} | set(range(last, 1500) if cause == "quarantine" else ())
        assert {t for t, row in enumerate(rows) if not row.valid[lane]} == gaps
    assert "quarantine" not in [cause for _, _, cause, _ in told(rows)]
