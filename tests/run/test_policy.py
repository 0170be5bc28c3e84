"""A policy used outside training: the episodes it plays in a plain Gymnasium loop are those that are scored, in every space."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector.utils import concatenate, create_empty_array

import freewheel
from freewheel.cli import main as cli
from freewheel.core import Decision, NDArray, Snapshot
from freewheel.errors import ObservationError, SetupError, UsageError
from freewheel.policies.spec import PolicySpec
from freewheel.run import policy as policy_module
from freewheel.run.naming import Result
from freewheel.run.policy import Policy
from freewheel.seeding import drawn, evaluation_episodes
from tests.support.kinds import KINDS, Kinds
from tests.support.runs import python, train

SEED, EPISODES = 7, 3
TABLE = ((0.0, 1.0), (1.0, 0.0))

Trained = Callable[[str], Result]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One update in these spaces, with weights large enough that observations decide."""
    runs, folder = dict[str, Result](), tmp_path_factory.mktemp("runs")

    def make(kind: str) -> Result:
        if kind not in runs:
            options: dict[str, Any] = {"context": TABLE} if kind == "context" else {}
            options["ppo"] = {"lr": 0.05}
            head = "squashed" if kind == "scaled" else "auto"
            options["policy"] = {"normalize_obs": kind in ("box", "nested"), "head": head}
            runs[kind] = train(
                folder, "tests.support.kinds:Kinds", env_args={"kind": kind}, run=kind.replace(" ", "-"), steps=128,
                evals=1, eval_episodes=1, mode="sequential", **options,
            )  # fmt: skip
        return runs[kind]

    return make


def played(policy: Policy, env: gymnasium.Env[Any, Any], number: int, context: NDArray | None = None) -> float:
    """The return of a greedy episode, as anybody would write it."""
    seed = evaluation_episodes(SEED, number, 1).seed(0)
    obs, info = env.reset(seed=seed, options=None if context is None else {"context": drawn(context, seed)})
    total, over = 0.0, False
    while not over:
        action, _ = policy.predict(obs, mask=info.get("action_mask"))
        obs, reward, terminated, truncated, info = env.step(action)
        total, over = total + float(reward), terminated or truncated
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_loop_plays_the_episodes_that_are_scored(trained: Trained, kind: str) -> None:
    result = trained(kind)
    policy, context = freewheel.load(result), np.array(TABLE, np.float32) if kind == "context" else None
    returns = [played(policy, Kinds(kind), number, context) for number in range(EPISODES)]
    assert len(set(returns)) > 1
    scored = freewheel.score(result, episodes=EPISODES, seed=SEED).returns
    np.testing.assert_allclose(returns, scored, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_many_are_answered_as_one_by_one(trained: Trained, kind: str) -> None:
    policy, env = freewheel.load(trained(kind)), Kinds(kind)
    seen = [env.reset(seed=seed) for seed in range(5)]
    masks = [info["action_mask"] for _, info in seen] if "info" in kind else None
    alone = [policy.predict(obs, mask=info.get("action_mask"))[0] for obs, info in seen]
    space, observations = env.observation_space, [obs for obs, _ in seen]
    empty: Any = create_empty_array(space, len(seen))
    for many in (concatenate(space, copy.deepcopy(observations), empty), observations):
        actions, state = policy.predict(many, mask=None if masks is None else np.stack(masks))
        assert state is None
        assert all(env.action_space.contains(action) for action in actions), actions
        np.testing.assert_allclose(actions, np.stack(alone), rtol=1e-5, atol=1e-5)


def test_the_command_line_scores_the_same(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    result = trained("nested")
    returns = [played(freewheel.load(result), Kinds("nested"), number) for number in range(EPISODES)]
    assert cli.main(["eval", str(result.path), "--seed", str(SEED), "--episodes", str(EPISODES)]) == 0
    assert f"mean {np.mean(returns):.1f}" in capsys.readouterr().out


WRONG = [
    ("box", np.zeros(4), {}, r"obs: expected shape \(3,\) or \(N, 3\), got \(4,\)"),
    ("box", np.zeros((1, 1, 3)), {}, r"obs: expected shape \(3,\) or \(N, 3\), got \(1, 1, 3\)"),
    ("box", [[1, 2, 3], [1, 2]], {}, "obs: observations of different shapes in list"),
    ("box", "left", {}, "obs: expected numbers of Box.*got str 'left'"),
    ("box", None, {}, "obs: expected numbers of Box.*got None"),
    ("box", np.zeros(3), {"mask": [1, 1, 1]}, "mask: this policy was trained without action masks; leave it out"),
    ("discrete", 2, {}, r"obs: expected a value of Discrete\(5, start=3\), got"),
    ("discrete", 2.5, {}, r"obs: expected a value of Discrete\(5, start=3\), got"),
    ("picture", np.zeros((4, 3, 1)), {}, "obs: expected numbers of Box.*, got dtype float64"),
    ("picture", np.full((4, 3, 1), 256), {}, "obs: expected numbers of Box.*, got dtype int64"),
    ("nested", {"arm": {"angle": np.zeros(2)}}, {}, "arm/gear: missing from the observation, which is dict"),
    ("nested", np.zeros(7), {}, "obs: expected the parts arm/angle, arm/gear, pair/0, pair/1, picture, got ndarray"),
    ("tuple", (np.zeros((2, 3)), np.array([0, 1, 2])), {}, "1: 3 observations, but 2 observations of 0"),
    ("tuple", (np.zeros((2, 3)), 1), {}, "1: one observation, but 2 observations of 0"),
    ("mask in obs", {"x": np.zeros(3)}, {}, "action_mask: this policy was trained with action masks; pass mask=, or put"),
    ("mask in info", np.zeros(3), {}, r"action_mask: this policy was trained with action masks; pass mask=info\['action_mask'\]"),
    ("mask in info", np.zeros(3), {"mask": np.zeros(4)}, "action_mask: allows no action at all"),
    ("mask in info", np.zeros(3), {"mask": np.ones(3)}, r"action_mask: expected shape \(4,\) or \(N, 4\), got \(3,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "obs", "more", "line"), WRONG)
def test_what_does_not_fit_is_one_line(trained: Trained, kind: str, obs: Any, more: dict[str, Any], line: str) -> None:
    with pytest.raises(ObservationError, match=f"^{line}") as caught:
        freewheel.load(trained(kind)).predict(obs, **more)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_mask_is_obeyed_wherever_it_comes_from(trained: Trained) -> None:
    policy, x = freewheel.load(trained("mask in obs")), np.zeros(3, np.float32)
    for only in range(4):
        mask = np.eye(4)[only]
        assert policy.predict({"x": x}, mask=mask)[0] == policy.predict({"x": x, "action_mask": mask})[0] == only
        assert policy.predict({"x": x}, mask=mask, deterministic=False)[0] == only
    both = {"x": np.zeros((4, 3)), "action_mask": np.ones((4, 4))}
    assert policy.predict(both, mask=np.eye(4, dtype=bool))[0].tolist() == [0, 1, 2, 3], "the argument comes first"


def test_what_only_the_critic_sees_is_not_asked_for(trained: Trained) -> None:
    policy, x = freewheel.load(trained("critic")), np.ones(3, np.float32)
    action, _ = policy.predict({"policy": x})
    np.testing.assert_array_equal(action, policy.predict({"policy": x, "critic": np.ones(5)})[0])
    np.testing.assert_array_equal(action, policy.predict(x)[0], "the group itself")
    np.testing.assert_allclose([action] * 2, policy.predict(np.stack([x, x]))[0], rtol=1e-5, atol=1e-5)


def test_lists_as_they_come_in_a_message(trained: Trained) -> None:
    obs, _ = Kinds("picture").reset(seed=1)
    policy = freewheel.load(trained("picture"))
    assert policy.predict(json.loads(json.dumps(obs.tolist()))) == policy.predict(obs)
    policy = freewheel.load(trained("box"))
    assert policy.predict([0.5, 1, -1]) == policy.predict(np.array([0.5, 1, -1], np.float32))


def test_no_observations_are_answered_with_no_actions(trained: Trained) -> None:
    assert freewheel.load(trained("box")).predict(np.zeros((0, 3)))[0].tolist() == []
    assert freewheel.load(trained("scaled")).predict(np.zeros((0, 2, 2)))[0].shape == (0, 1, 2)
    assert freewheel.load(trained("mask in info")).predict(np.zeros((0, 3)), mask=np.zeros((0, 4)))[0].shape == (0,)


def test_tensors_are_answered_with_tensors(trained: Trained) -> None:
    policy, env = freewheel.load(trained("scaled")), Kinds("scaled")
    obs = np.stack([env.reset(seed=seed)[0] for seed in range(3)])
    many, _ = policy.predict(torch.tensor(obs, requires_grad=True))
    one, _ = policy.predict(torch.tensor(obs[0]))
    assert isinstance(many, torch.Tensor)
    assert isinstance(one, torch.Tensor)
    np.testing.assert_allclose(many.numpy(), policy.predict(obs)[0])
    assert one.shape == (1, 2)


def test_samples_follow_their_seed_and_the_policy(trained: Trained) -> None:
    policy, obs = freewheel.load(trained("box")), np.zeros(3, np.float32)

    def draw(seed: int) -> list[int]:
        policy.seed(seed)
        return [policy.predict(obs, deterministic=False)[0] for _ in range(40)]

    assert draw(1) == draw(1) != draw(2)
    assert len(set(draw(1))) > 1
    assert freewheel.load(trained("box")).predict(np.zeros((50, 3)), deterministic=False)[0].shape == (50,)


def test_a_memory_is_passed_through(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        """A recurrent actor that chooses how many steps it has seen."""

        state_size = 1

        def __init__(self, spec: PolicySpec) -> None:
            pass

        def load(self, snapshot: Snapshot) -> None:
            pass

        def act(self, obs: NDArray, rng: Any, *, state: NDArray | None = None, greedy: bool = False) -> Decision:
            assert state is not None
            return Decision(state[:, 0].astype(np.int64), np.zeros(len(obs)), state + 1)

    monkeypatch.setattr(policy_module, "make_actor", lambda spec: lambda: Counting(spec))
    policy, obs, state = freewheel.load(trained("box")), np.zeros(3, np.float32), None
    for steps in range(3):
        action, state = policy.predict(obs, state=state)
        assert (action, state.shape) == (steps, (1,))
    actions, states = policy.predict(np.zeros((2, 3)), state=np.array([[4.0], [9.0]]))
    assert (actions.tolist(), states.tolist()) == ([4, 9], [[5.0], [10.0]])
    with pytest.raises(ObservationError, match=r"^state: expected shape \(2, 1\), got \(1,\)$"):
        policy.predict(np.zeros((2, 3)), state=state)


def test_it_is_used_from_threads_and_in_other_processes(trained: Trained) -> None:
    policy = freewheel.load(trained("scaled"))
    many = np.random.default_rng(0).uniform(-1, 1, (400, 2, 2))
    expected = policy.predict(many)[0]
    alone = [policy.predict(one)[0] for one in many]
    with ThreadPoolExecutor(4) as pool:
        np.testing.assert_array_equal([one for one, _ in pool.map(policy.predict, many)], alone)
    for other in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):  # noqa: S301
        np.testing.assert_array_equal(other.predict(many)[0], expected)


def test_a_run_is_named_in_every_way(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = trained("box")
    (tmp_path / "runs").symlink_to(result.path.parent)
    monkeypatch.chdir(tmp_path)
    saved = result.path / "checkpoints" / "latest"
    for run in ("box", result, result.path, str(result.path), saved, saved / "policy.json"):
        policy = freewheel.load(run)
        assert (policy.env, policy.step) == ("tests.support.kinds:Kinds", 128)
    assert freewheel.load(result, 128).path == freewheel.load(result, "latest").path.resolve()
    with pytest.raises(UsageError, match="there is no checkpoint of step 5"):
        freewheel.load(result, 5)
    with pytest.raises(UsageError, match="no run 'nothing'"):
        freewheel.load("nothing")


def test_nothing_but_numpy_is_imported_and_never_the_environment(trained: Trained) -> None:
    code = f"""
import sys, freewheel, numpy as np
arm, pair = {{"angle": np.zeros(2), "gear": 1}}, (np.zeros(2, np.int8), 3)
policy = freewheel.load({str(trained("nested").path)!r})
policy.predict({{"arm": arm, "pair": pair, "picture": np.zeros((4, 3, 1), np.uint8)}})
assert policy.env == "tests.support.kinds:Kinds"
print([name for name in ("tests", "gymnasium", "torch", "tyro", "rich") if name in sys.modules])
"""
    assert python("-c", code).stdout == "[]\n"


@pytest.fixture
def old(trained: Trained, tmp_path: Path) -> Path:
    """A run as it was saved before checkpoints had the spaces."""
    from freewheel.run.checkpoints import checkpoint
    from freewheel.run.checkpoints.store import Store

    path = tmp_path / "old"
    shutil.copytree(trained("box").path, path, symlinks=True)
    found = checkpoint.load(path / "checkpoints")
    about = {name: found.about[name] for name in ("policy", "version")}
    shutil.rmtree(path / "checkpoints")
    Store(path / "checkpoints").save(found.step, found.params, about, best=True)
    return path


def test_a_run_saved_without_its_spaces_says_what_to_do(old: Path, trained: Trained) -> None:
    told = r"was saved without its spaces; pass the environment it was trained on: freewheel"
    with pytest.raises(SetupError, match=told):
        freewheel.load(old)
    obs = Kinds("box").reset(seed=3)[0]
    assert freewheel.load(old, env=lambda: Kinds("box")).predict(obs) == freewheel.load(trained("box")).predict(obs)
    told = "does not fit the policy: the policy has 3 observation columns and 3 actions, the"
    with pytest.raises(SetupError, match=told):
        freewheel.load(old, env=lambda: Kinds("scaled"))
    assert freewheel.score(old, episodes=2).returns == freewheel.score(trained("box"), episodes=2).returns


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("scaled", r"the policy reads 'obs' Box\(.*\(3,\).*the environment has 'obs' Box\(.*\(2, 2\)"),
        ("start", r"the policy acts in Discrete\(3, start=0\), the environment in Discrete\(4, start=-2\)"),
        ("nested", "the policy reads 'obs' Box.*, the environment has no 'obs'"),
        ("mask in info", r"the policy was trained without info\['action_mask'\], the environment differs"),
    ],
)
def test_another_environment_has_to_fit(trained: Trained, kind: str, line: str) -> None:
    def other(**_: str) -> Kinds:
        return Kinds(kind)

    with pytest.raises(SetupError, match=f"other does not fit the policy: {line}"):
        freewheel.score(trained("box"), env=other, episodes=1)


SCRIPT = """
import freewheel
from tests.support.worlds import Identity

class Toy(Identity):
    pass

if __name__ == "__main__":
    small = dict(steps=64, num_envs=2, num_steps_per_env=16, eval_episodes=3, mode="sequential", quiet=True)
    result = freewheel.train(Toy, run="toy", **small)
    policy = freewheel.load(result)
    print(policy.env, type(policy.predict(Toy().reset(seed=1)[0])[0]).__name__)
    print(freewheel.score(result, env=Toy, episodes=3, seed=7).mean)
    try:
        freewheel.score(result)
    except Exception as error:
        print(error)
"""


@pytest.mark.system
def test_a_run_of_a_script_stays_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "toy.py").write_text(SCRIPT)
    name, mean, refused = python("toy.py", cwd=tmp_path).stdout.splitlines()
    assert name == "__main__:Toy int"
    advice = "add env=Toy to this call in Python, --env ./file.py:Toy to this command"
    assert refused == f"__main__:Toy was defined in a script and cannot be imported; {advice}"
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eval", "toy", "--env", "./toy.py:Toy", "--episodes", "3", "--seed", "7"]) == 0
    assert f"mean {float(mean):.1f} " in capsys.readouterr().out
    assert cli.main(["eval", "toy"]) == 1
    assert capsys.readouterr().err == f"freewheel: {refused}\n"
    assert freewheel.load("toy").env == "__main__:Toy"
