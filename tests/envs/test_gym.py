"""Gymnasium envs in this process: rows, seeds, masks, measures, and what is said when an env fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv

from freewheel.core import Env, NDArray, Slice, Step
from freewheel.envs.family import register_ids
from freewheel.envs.gym import GymConfig, GymLoop, GymVector
from freewheel.errors import EnvError, FreewheelError, SetupError, UsageError
from freewheel.rollout.factory import Timeouts
from freewheel.seeding import training_episodes
from freewheel.testing.conformance import check_env
from tests.support import worlds as testing
from tests.support.worlds import Counter

WORLDS = ["CartPole-v1", "Pendulum-v1"] + [
    f"tests.support.worlds:{name}" for name in ("Identity", "IdentityBox", "Drifting", "Counter", "MutatesBuffer")
]


def streams(lanes: range) -> list[Any]:
    return [training_episodes(0, lane) for lane in lanes]


def zeros(env: Env) -> NDArray:
    return np.zeros((env.spec.lanes, *env.spec.action.shape), env.spec.action.dtype)


def turn(env: Env) -> tuple[Step, NDArray]:
    """A step and what to act on next."""
    return env.step(zeros(env)), env.autoreset()


@pytest.mark.parametrize("world", WORLDS)
def test_worlds_conform(world: str) -> None:
    check_env(GymConfig(world).make)


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_rows_of_a_counter(ends: str) -> None:
    """Two lanes, episodes of 2 steps: every field written out."""
    lanes = range(4, 6)
    env = GymConfig("tests.support.worlds:Counter", {"length": 2, "ends": ends}, measures=("count",)).make(lanes)
    seed = [[training_episodes(0, lane).seed(k) % 1000 for lane in lanes] for k in range(3)]
    assert env.reset(streams(lanes)).tolist() == [[seed[0][0], 0], [seed[0][1], 0]]
    for k, (count, over) in enumerate([(1, False), (2, True), (1, False), (2, True)]):
        here, after = seed[k // 2], seed[k // 2 + over]
        step, obs = turn(env)
        assert step.next_obs.tolist() == [[here[0], count], [here[1], count]]
        assert obs.tolist() == [[after[0], 0 if over else count], [after[1], 0 if over else count]]
        assert step.reward.tolist() == [count, count]
        assert step.terminated.tolist() == [over and ends == "terminated"] * 2
        assert step.truncated.tolist() == [over and ends == "truncated"] * 2
        assert step.valid.tolist() == [True, True]
        assert step.measures.tolist() == [[2], [2]] or not over
        assert (step.reset_ns, step.failures) == (0, ())


def test_a_time_limit_truncates_and_none_keeps_the_ids_own() -> None:
    for world, args in ("tests.support.worlds:Counter", {"length": 9}), ("CartPole-v1", {}):
        env = GymConfig(world, args, max_episode_steps=2).make(range(1))
        env.reset(streams(range(1)))
        assert [turn(env)[0].truncated.tolist() for _ in range(3)] == [[False], [True], [False]]
    env = GymConfig("Pendulum-v1").make(range(1))
    env.reset(streams(range(1)))
    assert np.flatnonzero([turn(env)[0].truncated[0] for _ in range(400)]).tolist() == [199, 399]


def test_reset_starts_the_streams_again() -> None:
    env = GymConfig("tests.support.worlds:Counter", {"length": 1}).make(range(1))
    first = env.reset(streams(range(1))).copy()
    assert turn(env)[1].tolist() != first.tolist()
    assert env.reset(streams(range(1))).tolist() == first.tolist()
    env.step(zeros(env))  # an end that nobody renews
    assert env.reset(streams(range(1))).tolist() == env.autoreset().tolist() == first.tolist()
    assert turn(env)[0] is turn(env)[0], "a step allocates no Step"


def test_the_next_episode_begins_when_asked_for_and_once() -> None:
    begun: list[int | None] = []

    class Noted(Counter):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            begun.append(seed)
            return super().reset(seed=seed, options=options)

    lengths = iter([1, 3])
    env = GymConfig("Noted", factory=lambda: Noted(next(lengths))).make(range(2))
    one, other = streams(range(2))
    env.reset([one, other])
    begun.clear()
    step = env.step(zeros(env))
    assert begun == [], "the row can be shipped before a slow reset"
    told = step.next_obs.tolist()
    for _ in range(2):
        assert env.autoreset().tolist() == [[one.seed(1) % 1000, 0], [other.seed(0) % 1000, 1]]
        assert begun == [one.seed(1)]
        assert step.next_obs.tolist() == told == [[one.seed(0) % 1000, 1], [other.seed(0) % 1000, 1]]
    for ends, counts in (([True, False], [0, 2]), ([True, True], [0, 0])):  # one lane ends while the other goes on
        step, obs = turn(env)
        assert (step.terminated.tolist(), obs[:, 1].tolist()) == (ends, counts)


class Recorder(testing.IdentityBox):
    """Keeps the very action objects it was given, as envs with a memory do."""

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__()
        self.action_space = space
        self.kept: list[Any] = []

    def judge(self, action: Any) -> float:
        self.kept.append(action)
        return 0.0


def recorded(space: gymnasium.Space[Any], *actions: Any) -> list[Any]:
    env = Recorder(space)
    loop = GymLoop([env], "Recorder", range(1))
    loop.reset(streams(range(1)))
    for action in actions:
        loop.step(np.array([action], loop.spec.action.dtype))
    return env.kept


def test_actions_arrive_scaled_in_the_envs_shape_and_stay_what_they_were() -> None:
    kept = recorded(Discrete(3, start=2), 0, 2)
    assert kept == [2, 4]
    assert [type(action) for action in kept] == [int, int]
    space = Box(np.array([[-2.0], [0.0]]), np.array([[2.0], [10.0]]), dtype=np.float64)
    kept = recorded(space, [0.5, 0.5], [-5.0, 5.0], [0.0, 0.0])
    assert [action.tolist() for action in kept] == [[[1.0], [7.5]], [[-2.0], [10.0]], [[0.0], [5.0]]]
    assert all(space.contains(action) for action in kept)


class Masked(Counter):
    """Allows action 0 on even counts and 1 on odd ones; says so in info, or in the observation."""

    def __init__(self, where: str, forget_at: int = -1) -> None:
        super().__init__(length=3)
        self.where, self.forget_at = where, forget_at
        if where == "obs":
            mask, count = Box(0, 1, (2,), np.int8), Box(0, 1000, (2,), np.float32)
            self.observation_space: gymnasium.Space[Any] = Dict(action_mask=mask, count=count)

    def told(self, observation: NDArray, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = np.array([self.count % 2 == 0, self.count % 2 == 1], np.int8)
        if self.where == "obs":
            return {"action_mask": mask, "count": observation}, info
        return observation, info if self.count == self.forget_at else {**info, "action_mask": mask}

    def reset(self, **given: Any) -> Any:
        return self.told(*super().reset(**given))

    def step(self, action: Any) -> Any:
        observation, *rest, info = super().step(action)
        observation, info = self.told(observation, info)
        return observation, *rest, info


@pytest.mark.parametrize("where", ["obs", "info"])
def test_a_mask_is_the_last_slice(where: str) -> None:
    env = GymConfig("Masked", factory=lambda: Masked(where)).make(range(1))
    assert env.spec.slices[-1] == Slice("action_mask", 2, 4, (2,))
    assert env.reset(streams(range(1)))[0, 1:].tolist() == [0, 1, 0]
    assert turn(env)[1][0, 1:].tolist() == [1, 0, 1]
    env.step(zeros(env))
    end, obs = turn(env)
    assert (end.next_obs[0, 1:].tolist(), obs[0, 1:].tolist()) == ([3, 0, 1], [0, 1, 0])
    check_env(GymConfig("Masked", factory=lambda: Masked(where)).make)


def test_a_mask_may_be_missing_at_the_end_only() -> None:
    env = GymConfig("Masked", factory=lambda: Masked("info", forget_at=3)).make(range(1))
    env.reset(streams(range(1)))
    assert [env.step(zeros(env)).next_obs[0, 2:].tolist() for _ in range(3)] == [[0, 1], [1, 0], [1, 1]]
    env = GymConfig("Masked", factory=lambda: Masked("info", forget_at=1)).make(range(1))
    env.reset(streams(range(1)))
    with pytest.raises(EnvError, match=r"gave a wrong answer in step\(\): no 'action_mask' in info") as caught:
        env.step(zeros(env))
    assert caught.value.cause == "shape"


def failing(world: str, args: dict[str, Any], **options: Any) -> Env:
    return GymConfig(f"tests.support.worlds:{world}", args, **options).make(range(1, 4))


def failure(env: Env, steps: int = 9) -> list[str]:
    def play() -> None:
        env.reset(streams(range(1, 4)))
        for _ in range(steps):
            env.step(np.ones(3, np.int64))
            env.autoreset()

    with pytest.raises(EnvError) as caught:
        play()
    assert str(caught.value) == caught.value.report
    assert caught.value.cause == "env_error"
    return caught.value.report.splitlines()


def test_an_env_that_raises_is_named_with_its_traceback() -> None:
    seed = training_episodes(0, 2).seed(1)  # lane 2's second episode
    report = failure(failing("Raises", {"at": 3, "only_seed": seed, "length": 4}), steps=8)
    where = f"(episode 1, seed {seed}, step 3, last action 1)"
    assert report[0] == f"lane 2 of tests.support.worlds:Raises raised ValueError: boom {where}"
    assert report[1] == "Traceback (most recent call last):"
    assert 'raise ValueError("boom")' in "\n".join(report)
    assert report[-1] == "ValueError: boom"
    assert not [line for line in report if "freewheel/envs" in line], "our own frames are of no use to the reader"
    seed = training_episodes(0, 3).seed(0)
    report = failure(failing("Raises", {"at": 0, "only_seed": seed}))
    assert report[0].startswith("lane 3 of tests.support.worlds:Raises raised ValueError: boom (episode 0, ")
    assert report[0].endswith(f"seed {seed}, in reset)")


def test_a_loop_can_be_used_again_after_a_failure() -> None:
    env = failing("Raises", {"at": 2, "only_seed": training_episodes(0, 2).seed(0)})
    failure(env)
    first = env.reset([training_episodes(0, lane, start=5) for lane in range(1, 4)])
    assert first.tolist() == [[training_episodes(0, lane, start=5).seed(0) % 1000, 0] for lane in range(1, 4)]
    assert env.step(np.ones(3, np.int64)).reward.tolist() == [1, 1, 1]
    env = failing("ReturnsNaN", {"at": 1})
    env.reset(streams(range(1, 4)))
    assert np.isnan(env.step(np.ones(3, np.int64)).next_obs).all(), "numbers that are not finite are no failure here"


SEEN = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((SEEN, 1.0, True, {}), "answer in step(): not enough values to unpack (expected 5, got 4)"),
        ((SEEN, None, False, False, {}), "answer in step(): the reward must be a number, not None"),
        ((None, 1.0, False, False, {}), "observation in step(): obs: expected an array of shape (2,), got None"),
        ((SEEN[:1], 1.0, False, False, {}), "observation in step(): obs: expected shape (2,), got (1,)"),
        ((SEEN, 1.0, True, False, {}), "answer in step(): no 'score' in info"),
    ],
)
def test_an_answer_that_breaks_the_api_is_named(answer: Any, text: str) -> None:
    class Odd(Counter):
        def step(self, action: Any) -> Any:
            return answer

    env = GymConfig("Odd", factory=Odd, measures=("score",)).make(range(1))
    env.reset(streams(range(1)))
    with pytest.raises(EnvError) as caught:
        env.step(zeros(env))
    assert caught.value.report.startswith(f"lane 0 of Odd gave a wrong {text}")
    assert caught.value.cause == "shape"


def test_lanes_must_be_alike() -> None:
    sizes = iter([2, 3])
    with pytest.raises(SetupError, match="lane 8 of Odd has different spaces from earlier lanes"):
        GymConfig("Odd", factory=lambda: testing.Identity(next(sizes))).make(range(7, 9))


class Broken(Counter):
    def __init__(self, error: Exception) -> None:
        raise error


MISSING = gymnasium.error.DependencyNotInstalled('Box2D is not installed, run `pip install "gymnasium[box2d]"`')
LISTING = "python -c 'import gymnasium; gymnasium.pprint_registry()' lists all ids"
TOYS = "tests.support.worlds"
BOX = ModuleNotFoundError("No module named 'box'", name="box")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (GymConfig("CartPol-v1"), "unknown environment 'CartPol-v1'; did you mean 'CartPole-v1'?"),
        (GymConfig("Taxi-v3"), "unknown environment 'Taxi-v3'; did you mean 'Taxi-v4'"),  # outdated, and no warning
        (GymConfig("qqqqqqqq"), f"unknown environment 'qqqqqqqq'; {LISTING}"),
        (GymConfig("not an id!"), "cannot make 'not an id!': Malformed environment ID: not an id!."),
        (GymConfig("no.way:Env"), "cannot import 'no.way': there is no module 'no': install it"),
        (GymConfig(f"{TOYS}:Countr"), f"'{TOYS}' has no factory 'Countr'; did you mean 'Counter'?"),
        (GymConfig("CartPole-v1", {"x": 1}), "CartPole-v1 does not accept the arguments {'x': 1}: CartPoleEnv.__init"),
        (GymConfig(f"{TOYS}:Counter", {"x": 1}), f"{TOYS}:Counter does not accept the arguments {{'x': 1}}: Counter."),
        (GymConfig("X", factory=Broken), "X does not accept the arguments {}: Broken.__init__() missing 1 required"),
        (GymConfig("X", {"error": MISSING}, factory=Broken), f"X needs a package that is missing: {MISSING}"),
        (GymConfig("X", {"error": BOX}, factory=Broken), f"X cannot be imported ({BOX}): pip install box"),
        (GymConfig("X", {"n": 2}, factory=lambda n: n), "X returned int: it has to return an environment of Gymnasium"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_cannot_be_made_is_explained_in_a_line(config: GymConfig, text: str) -> None:
    with pytest.raises(SetupError) as caught:
        config.make(range(2))
    assert str(caught.value).startswith(text)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("no licence"), TypeError("no licence")])
def test_a_constructor_that_raises_is_quoted(error: Exception) -> None:
    with pytest.raises(EnvError) as caught:
        GymConfig("X", {"error": error}, factory=Broken).make(range(3, 4))
    kind = type(error).__name__
    lines = caught.value.report.splitlines()
    assert lines[0] == f"lane 3 of X raised {kind}: no licence (in its constructor)"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == f"{kind}: no licence"


def test_envs_made_before_a_failure_are_closed() -> None:
    closed = []

    class Third(Counter):
        made = 0

        def __init__(self) -> None:
            super().__init__()
            Third.made += 1
            self.number = Third.made
            if self.number == 3:
                raise RuntimeError("enough")

        def close(self) -> None:
            closed.append(self.number)

    with pytest.raises(EnvError, match="lane 2 of Third"):
        GymConfig("Third", factory=Third).make(range(5))
    assert sorted(closed) == [1, 2]


@pytest.mark.parametrize("processes", [False, True])
def test_a_warning_on_the_way_to_an_env_is_passed_on(processes: bool) -> None:
    def warns() -> Counter:
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return Counter()

    with pytest.warns(DeprecationWarning, match="old"):
        GymConfig("Warns", factory=warns).make(range(1), processes=processes).close()


def test_nonsense_is_refused_before_anything_starts() -> None:
    for build in (GymConfig, partial(GymConfig, "X", max_episode_steps=0), partial(Timeouts, step=0.0)):
        with pytest.raises(UsageError):
            build()


def test_close_closes_every_env_once_even_if_one_refuses() -> None:
    closed = []

    class Stubborn(Counter):
        def close(self) -> None:
            closed.append(self)
            if len(closed) == 1:
                raise OSError("no")

    env = GymConfig("Stubborn", factory=Stubborn).make(range(3))
    with pytest.warns(RuntimeWarning, match=r"^Stubborn raised OSError in close\(\): no$"):
        env.close()
    env.close()
    assert len(closed) == len(set(map(id, closed))) == 3


def test_the_spec_names_the_world_and_only_the_first_lane_is_rendered() -> None:
    env = GymConfig("CartPole-v1").make(range(4, 6), render_mode="rgb_array")
    spec = env.spec
    assert (spec.name, spec.lanes, spec.obs_size, spec.obs_dtype) == ("CartPole-v1", 2, 4, "float32")
    assert spec.slices == (Slice("obs", 0, 4, (4,)),)
    assert (spec.action.kind, spec.action.size, spec.device, spec.one_per_process) == ("discrete", 2, "cpu", False)
    env.reset(streams(range(4, 6)))
    picture = env.render()
    assert isinstance(picture, np.ndarray)
    assert picture.shape == (400, 600, 3)
    assert isinstance(env, GymLoop)
    assert [lane.env.render_mode for lane in env._lanes] == ["rgb_array", None]
    env.close()
    plain = GymConfig("CartPole-v1").make(range(1))
    plain.reset(streams(range(1)))
    assert plain.render() is None


@pytest.fixture
def registry() -> Iterator[dict[str, Any]]:
    before = dict(gymnasium.registry)
    yield gymnasium.registry
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


class SeededVector(VectorEnv[NDArray, NDArray, NDArray]):
    """B Counters that take a stream a lane."""

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP, "lane_seeds": True}  # noqa: RUF012

    def __init__(self, num_envs: int, length: int = 3) -> None:
        self.num_envs = num_envs
        self.envs = [Counter(length) for _ in range(num_envs)]
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.played = [0] * num_envs

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options is None:
            return np.zeros((self.num_envs, 2), np.float32), {}
        self.streams, self.played = options["seeds"], [0] * self.num_envs
        return np.stack([self.begin(lane) for lane in range(self.num_envs)]), {}

    def begin(self, lane: int) -> Any:
        return self.envs[lane].reset(seed=self.streams[lane].seed(self.played[lane]))[0]

    def step(self, actions: NDArray) -> Any:
        seen, rewards, terminated, truncated, _ = map(np.stack, zip(*(env.step(0) for env in self.envs), strict=True))
        first = seen.copy()
        for lane in np.flatnonzero(terminated).tolist():
            self.played[lane] += 1
            first[lane] = self.begin(lane)
        return first, rewards, terminated, truncated, {"final_obs": seen}


def test_an_ids_own_vector_env_is_used_if_it_seeds_lanes_apart(registry: dict[str, Any]) -> None:
    make_one: Any = Counter
    make_many: Any = SeededVector
    gymnasium.register("Seeded-v0", entry_point=make_one, vector_entry_point=make_many)
    assert isinstance(GymConfig("Seeded-v0").make(range(3)), GymVector)
    assert isinstance(GymConfig("Seeded-v0").make(range(3), fault_tolerant=True), GymVector)
    check_env(GymConfig("Seeded-v0", {"length": 4}).make)
    assert isinstance(GymConfig("CartPole-v1").make(range(3)), GymLoop), "Gymnasium's own takes one seed for all lanes"
    register_ids()
    worlds = ("Seeded-v0", "freewheel/Cage2-v0", "CartPole-v1", "freewheel/Straggler-v0")
    assert [GymConfig(world).batched for world in worlds] == [True, True, False, False]


@pytest.mark.usefixtures("registry")
def test_an_id_may_name_the_module_that_registers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registers_itself.py").write_text(
        "import gymnasium\ngymnasium.register('Late-v0', entry_point='tests.support.worlds:Counter', max_episode_steps=2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    env = GymConfig("registers_itself:Late-v0").make(range(1))
    env.reset(streams(range(1)))
    assert [env.step(zeros(env)).truncated.tolist() for _ in range(2)] == [[False], [True]]


def test_an_id_that_a_script_registered_travels_with_the_config(registry: dict[str, Any]) -> None:
    make_one: Any = Counter
    gymnasium.register("Mine-v0", entry_point=make_one, max_episode_steps=2)
    sent = cloudpickle.dumps(GymConfig("Mine-v0", measures=("count",)))
    del registry["Mine-v0"]
    with pytest.raises(FreewheelError):
        GymConfig("Mine-v0").make(range(1))
    arrived = cloudpickle.loads(sent)
    assert arrived == GymConfig("Mine-v0", measures=("count",))
    env = arrived.make(range(1))
    env.reset(streams(range(1)))
    assert [env.step(zeros(env)).truncated.tolist() for _ in range(2)] == [[False], [True]]
