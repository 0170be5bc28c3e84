"""CAGE Challenge 2 on the real simulator replays recorded games bit for bit, even if other games run at the same time."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box
from gymnasium.utils.env_checker import check_env

import freewheel
from freewheel.config.resolve import from_argv
from freewheel.core import Episode, NDArray, Tick
from freewheel.envs.gym import GymConfig, GymOptions
from freewheel.envs.legacy import GlobalRandom
from freewheel.errors import SetupError, UsageError
from freewheel.metrics.meter import Meter
from freewheel.seeding import training_episodes
from freewheel_cage2 import cyborg, cyborg_package, family
from freewheel_cage2.cyborg import Scenario2
from freewheel_cage2.env import BlueMemory
from freewheel_cage2.scenario import ACTIONS, FOOTHOLD, RED_AGENTS
from packages.cage2.tests.support.cage2_games import truth
from packages.cage2.tests.support.cyborg_worlds import STEPS, Scripted, script
from tests.support.places import ROOT

pytestmark = pytest.mark.system

RECORDED = Path(__file__).resolve().parent / "data" / "official"
GAMES = (0, 13, 20)  # blue acts at random, mostly sleeps, or analyses, removes and restores
MODES: Mapping[str, dict[str, Any]] = {
    "sequential": {"num_envs": 2},
    "lockstep": {"num_envs": 2, "placement": "processes"},
    "episodes": {"workers": 2},
}


def recorded(red_agent: str) -> dict[str, NDArray]:
    with np.load(RECORDED / f"cage2_{red_agent}.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def replay(env: Scenario2, game: int, record: Mapping[str, NDArray]) -> None:
    """Play a recorded game again. Everything that was recorded must be the same."""
    obs, info = env.reset(seed=int(record["seed"][game]))
    for step in range(101):
        before = truth(env)
        assert obs.tolist() == record["obs"][game, step].tolist()
        access = record["true_red_access"][game, step]
        assert before.access.tolist() == access.tolist()
        assert info["compromised"].tolist() == [bool(level) and host != FOOTHOLD for host, level in enumerate(access)]
        assert before.decoys.tolist() == record["true_decoys"][game, step].tolist()
        assert before.otservice == record["true_otservice_up"][game, step]
        if step == 100:
            break
        obs, reward, terminated, truncated, info = env.step(record["action"][game, step])
        after = truth(env)
        assert (reward, terminated, truncated) == (record["reward"][game, step], False, step == 99)
        assert after.red_action == record["red_action_vocab"][record["red_action"][game, step]]
        assert after.red_success == record["red_success"][game, step]
        assert after.blue_success == record["blue_success"][game, step]


@pytest.mark.parametrize("red_agent", RED_AGENTS)
def test_recorded_games_are_played_again_exactly(red_agent: str) -> None:
    env, record = Scenario2(red_agent), recorded(red_agent)
    for game in GAMES:
        replay(env, game, record)


def test_with_memory_it_remembers_what_the_fast_world_remembers() -> None:
    """Return the memory of the same game, which follows only from actions and observations."""
    real, record, memory = Scenario2("RedMeanderAgent", memory=True), recorded("RedMeanderAgent"), BlueMemory(1)
    for game in GAMES:
        obs, _ = real.reset(seed=int(record["seed"][game]))
        memory.begin(np.arange(1))
        assert not obs.any()
        for step, action in enumerate(record["action"][game]):
            obs = real.step(action)[0]
            memory.note(np.array([action]), record["obs"][game, step + 1][None].astype(np.float32))
            assert obs.tolist() == [*record["obs"][game, step + 1], *memory.columns[0]]
        assert memory.columns.any()
    assert real.observation_space.contains(obs)


def test_it_is_a_sound_gymnasium_env() -> None:
    env = Scenario2("mixture")
    with warnings.catch_warnings(record=True, action="always") as warned:
        check_env(env, skip_render_check=True)
    assert not any("not within the observation space" in str(warning.message) for warning in warned)
    assert env.observation_space == Box(0.0, 1.0, (52,), np.float32)
    assert tuple(map(str, env._game.possible_actions)) == ACTIONS
    obs, info = env.reset(seed=1)
    assert (obs.dtype.name, info["compromised"].dtype.name, info["compromised"].shape) == ("float32", "bool", (13,))
    assert not info["compromised"].any()
    begun = truth(env)
    assert (begun.red_action, begun.red_success, begun.blue_success) == ("", 2, 2)
    assert begun.access.tolist() == [2 if host == FOOTHOLD else 0 for host in range(13)]


@pytest.mark.parametrize("limit", [30, None])
def test_episodes_are_truncated_at_the_limit_and_never_terminated(limit: int | None) -> None:
    env = Scenario2("SleepAgent", max_episode_steps=limit)
    for _ in range(2):
        env.reset(seed=3)
        ends = [env.step(0)[2:4] for _ in range(limit or 101)]
        assert ends == [(False, step + 1 == limit) for step in range(limit or 101)]


def hand_driven(seed: int, red_agent: str = "B_lineAgent") -> list[Any]:
    """Play the episode of a seed without other games."""
    env = Scenario2(red_agent)
    return [env.reset(seed=seed)[0].tolist(), *(step_result(env, action) for action in script(seed))]


def step_result(env: Scenario2, action: int) -> tuple[Any, ...]:
    obs, reward, *_, info = env.step(action)
    return obs.tolist(), reward, info["compromised"].tolist(), truth(env).red_action


def test_the_callers_random_numbers_are_left_alone() -> None:
    kept = random.getstate()
    try:
        random.setstate(random.Random(1).getstate())
        expected = random.Random(1)
        env = Scenario2("RedMeanderAgent")
        assert random.random() == expected.random()
        env.reset(seed=5)
        assert random.random() == expected.random()
        for _ in range(10):
            env.step(0)
            assert random.random() == expected.random()
    finally:
        random.setstate(kept)


def test_an_episode_depends_on_its_seed_alone() -> None:
    """It depends neither on games that are played in turns with it nor on earlier games."""
    alone, envs = {seed: hand_driven(seed) for seed in (11, 12)}, [Scenario2(), Scenario2()]
    for seeds in ((11, 12), (12, 11)):
        together = [[env.reset(seed=seed)[0].tolist()] for env, seed in zip(envs, seeds, strict=True)]
        for actions in zip(*map(script, seeds), strict=True):
            for env, story, action in zip(envs, together, actions, strict=True):
                random.random()  # another user of the global random numbers
                story.append(step_result(env, action))
        assert together == [alone[seed] for seed in seeds]


def test_without_a_seed_the_stream_continues() -> None:
    twice = []
    for _ in range(2):
        env = Scenario2()
        env.reset(seed=2)
        env.reset()
        twice.append([step_result(env, 0) for _ in range(20)])
    assert twice[0] == twice[1]
    assert twice[0] != [step_result(env, 0) for env in [Scenario2()] for _ in [env.reset(seed=2)] for _ in range(20)]


def test_a_given_stream_continues_and_ignores_seeds() -> None:
    dice, alone = GlobalRandom(5), GlobalRandom(5)
    one, other = Scenario2("RedMeanderAgent", stream=dice), Scenario2("RedMeanderAgent", stream=alone)
    one.reset(seed=1)
    other.reset(seed=2)
    assert dice.state == alone.state
    assert [step_result(one, 0) for _ in range(10)] == [step_result(other, 0) for _ in range(10)]


def test_a_mixture_is_one_of_the_two_by_the_seed_alone() -> None:
    """After the first sweep B_line scans one host, and Meander scans all hosts."""
    mixed, alone, drawn = Scenario2("mixture"), {name: Scenario2(name) for name in cyborg.MIXED}, []
    for seed in range(12):
        mixed.reset(seed=seed)
        story = [step_result(mixed, 0) for _ in range(4)]
        for env in alone.values():
            env.reset(seed=seed)
        stories = {name: [step_result(env, 0) for _ in range(4)] for name, env in alone.items()}
        drawn.append([name for name in cyborg.MIXED if stories[name] == story])
    assert all(len(names) == 1 for names in drawn)
    assert 3 <= sum(names == ["B_lineAgent"] for names in drawn) <= 9


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_is_the_same_in_every_mode(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lane and number determine the seed, and the seed determines the episode. Workers do not load torch."""
    played = train(tmp_path, monkeypatch, mode=mode, **MODES[mode])
    assert len(played) >= 4
    env = Scripted()
    for episode in played:
        assert episode.seed == training_episodes(3, episode.lane).seed(episode.number)
        env.reset(seed=episode.seed)
        assert episode.ret == pytest.approx(sum(env.step(0)[1] for _ in range(STEPS)), abs=1e-4)
        assert episode.measures == (float(mode == "sequential"),)


def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Sequence[Episode]:
    """Return every episode of a short run."""
    played: list[Episode] = []
    take = Meter.take

    def seen(meter: Meter, tick: Tick) -> None:
        played.extend(episode for chunk in tick.chunks for episode in chunk.episodes)
        take(meter, tick)

    monkeypatch.setattr(Meter, "take", seen)
    small: dict[str, Any] = {"env_args": {"red_agent": "mixture"}, "measures": ["torch"], "policy.hidden": [8]}
    small |= {"num_steps_per_env": STEPS, "steps": 4 * STEPS, "evals": 0, "seed": 3}
    freewheel.train(
        "packages.cage2.tests.support.cyborg_worlds:Scripted",
        quiet=True,
        runs_dir=tmp_path,
        **small,
        **options,
    )
    return played


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown red agent 'B_lien'; did you mean 'B_lineAgent'\?"):
        Scenario2("B_lien")
    with pytest.raises(UsageError, match="max_episode_steps is 0"):
        Scenario2(max_episode_steps=0)
    with pytest.raises(ResetNeeded):
        Scenario2().step(0)


def in_a_process(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Start a new interpreter with these folders first in its path."""
    paths = ":".join(map(str, (*folders, ROOT)))
    command, env = [sys.executable, "-c", textwrap.dedent(code)], {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


#: As sitecustomize.py this runs in every process that has its folder in the path, including workers.
HIDE = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "csle_cyborg" else find(name, *rest)
"""


@pytest.mark.parametrize(("mode", "namesake"), [("sequential", False), ("episodes", True)])
def test_without_a_simulator_the_error_names_what_to_install(mode: str, namesake: bool, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    if namesake:
        (tmp_path / "cyborg").mkdir()
        (tmp_path / "cyborg" / "__init__.py").write_text("raise SystemExit('never to be run')")
    command = f"from freewheel.cli.main import main; raise SystemExit(main(['train', 'cyborg:Scenario2', '--mode', '{mode}']))"
    done = in_a_process(command, tmp_path)
    message = f"the simulator CybORG is not installed: {cyborg_package.INSTALL}{cyborg_package.NAMESAKE * namesake}"
    assert (done.returncode, done.stderr) == (1, f"freewheel: {message}\n")


def test_workers_find_the_simulator_loaded_and_nobody_loads_torch() -> None:
    """The fork server loads the simulator, and the stand-in for the learner is removed."""
    assert set(from_argv(["cyborg:Scenario2"]).env.modules) == set(family.MODULES)
    done = in_a_process(
        """
        from freewheel_cage2.cyborg import Scenario2
        from freewheel_cage2.family import MODULES
        from freewheel.transport.executors import call_in_process
        def look():
            import sys
            return [name in sys.modules for name in ("csle_cyborg.main", "torch", "stable_baselines3")]
        print(call_in_process(look, "a look", 100.0, MODULES), look())
        Scenario2().reset(seed=0)
        print(look())
        """
    )
    assert (done.stdout, done.stderr) == ("[True, False, False] [False, False, False]\n[True, False, False]\n", "")


OFFICIAL = {
    "__init__.py": """
        from copy import deepcopy
        from csle_cyborg.main import Main
        from gym_csle_cyborg.constants.constants import CYBORG
        class CybORG(Main):
            def __init__(self, path, environment, agents):
                assert path.endswith("/CybORG/Shared/Scenarios/Scenario2.yaml")
                super().__init__(deepcopy(CYBORG.CYBORG_SCENARIO_2_DICT), environment, agents=agents)
        """,
    "Agents/__init__.py": """
        import sys, warnings
        from stable_baselines3 import PPO
        from csle_cyborg.agents import B_lineAgent, RedMeanderAgent, SleepAgent
        print("Gym has been unmaintained since 2022", file=sys.stderr)
        warnings.warn("and so on")
        """,
    "Agents/Wrappers/__init__.py": """
        from csle_cyborg.agents.wrappers.challenge_wrapper import ChallengeWrapper as Newer
        class ChallengeWrapper(Newer):
            def step(self, action=None):
                return super().step(action)[:4]
            def reset(self):
                return super().reset()[0]
        """,
}


@pytest.fixture
def official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The differences of the official repository: names, the scenario's path, four values per step, and a plain reset."""
    for name, text in OFFICIAL.items():
        path = tmp_path / "CybORG" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    seen = importlib.util.find_spec
    monkeypatch.setattr(cyborg_package, "find_spec", lambda name: None if name == "csle_cyborg" else seen(name))
    for name in [name for name in sys.modules if name.partition(".")[0] == "CybORG"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("official")
def test_the_official_repository_is_played_as_well(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    package = cyborg_package.find()
    assert package.name == "CybORG"
    monkeypatch.setattr(cyborg_package, "PACKAGE", package)
    replay(Scenario2("B_lineAgent"), GAMES[0], recorded("B_lineAgent"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("official")
def test_another_challenges_simulator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cyborg_package, "PACKAGE", cyborg_package.find())
    monkeypatch.setattr(cyborg, "ACTIONS", ("Sleep",) * 194)
    with pytest.raises(SetupError, match=r"^this CybORG is not the version of CAGE Challenge 2: blue has 145 actions"):
        Scenario2()


SLEEPING = {"red_agent": "SleepAgent"}


def test_a_world_of_that_name_has_a_limit_of_100_or_the_one_asked_for() -> None:
    for asked, limit in ((None, 100), (30, 30), (500, 500)):
        config = family.build("cyborg:Scenario2", SLEEPING, GymOptions(max_episode_steps=asked), "cpu")
        assert isinstance(config, GymConfig)
        assert (config.name, config.max_episode_steps) == ("cyborg:Scenario2", limit)
    env = family.real(GymConfig("X", SLEEPING, max_episode_steps=130)).open(0)
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(130)] == [False] * 129 + [True]
    with pytest.raises(UsageError, match="unknown scenario 'cyborg:Scenario1'; did you mean 'cyborg:Scenario2'"):
        family.build("cyborg:Scenario1", {}, GymOptions(), "cpu")
