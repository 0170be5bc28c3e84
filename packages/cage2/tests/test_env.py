"""The fast environment: its tables, equal episodes in all lanes, fair random numbers, and the defender's memory."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from freewheel.core import NDArray
from freewheel.envs.family import register_ids
from freewheel.errors import UsageError
from freewheel.seeding import training_episodes
from freewheel_cage2.env import COLUMNS, BlueMemory, Cage2Vector
from freewheel_cage2.network import _PER_GAME, _PER_HOST, EXPLOIT, NetworkStates, choose_exploit
from freewheel_cage2.scenario import ACTIONS, HOSTS, LAST_DECOY, PLACES, PORTS, REDS

NAME = "freewheel/Cage2-v0"


@pytest.fixture(autouse=True)
def _registered() -> None:
    register_ids()


def episode(games: Cage2Vector, lane: int, actions: NDArray) -> Iterator[tuple[bytes, float]]:
    """Return what one lane shows while all lanes act in the same way."""
    for action in actions:
        obs, reward, _, _, _ = games.step(np.full(games.num_envs, action))
        yield obs[lane].tobytes(), float(reward[lane])


def replayed(red: str, lanes: int, lane: int, number: int, *, before: int = 0) -> list[tuple[bytes, float]]:
    """Play episode `number` of seed 7's lane 3 in lane `lane`, after a number of other episodes."""
    games = Cage2Vector(lanes, red, max_episode_steps=40)
    streams = [training_episodes(7, 100 + other) for other in range(lanes)]
    streams[lane] = training_episodes(7, 3, start=number - before)
    games.reset(options={"seeds": streams})
    rng = np.random.default_rng(5)
    for _ in range(before):
        list(episode(games, lane, rng.integers(145, size=40)))
        games.reset(options={"reset_mask": np.ones(lanes, np.bool_)})
    return list(episode(games, lane, np.random.default_rng(6).integers(145, size=40)))


@pytest.mark.parametrize("red", REDS)
def test_an_episode_is_the_same_whoever_plays_it(red: str) -> None:
    alone = replayed(red, 1, 0, 2)
    assert replayed(red, 16, 11, 2) == alone, "in another lane, beside others"
    assert replayed(red, 3, 1, 2, before=2) == alone, "after other episodes"
    if red != "SleepAgent":
        assert replayed(red, 1, 0, 3) != alone


def unlike_a_fresh_one(games: Cage2Vector) -> set[str]:
    """Return the parts of the state that differ from a new game."""
    fresh = NetworkStates(games.num_envs)
    return {name for name in (*_PER_HOST, *_PER_GAME) if (getattr(games.nets, name) != getattr(fresh, name)).any()}


def test_a_new_game_is_new_in_everything() -> None:
    games, rng = Cage2Vector(64, "RedMeanderAgent"), np.random.default_rng(3)
    games.reset(seed=4)
    for _ in range(60):
        games.step(rng.integers(145, size=64))
    assert unlike_a_fresh_one(games) == {*_PER_HOST, *_PER_GAME}, "all of it has been touched"
    games.reset(options={"reset_mask": np.ones(64, np.bool_)})
    assert unlike_a_fresh_one(games) == set()


def test_a_new_game_leaves_the_others_alone() -> None:
    games, rng = Cage2Vector(8, "RedMeanderAgent", memory=True), np.random.default_rng(0)
    games.reset(seed=1)
    for _ in range(30):
        before = games.step(rng.integers(145, size=8))[0]
    mask = np.arange(8) % 3 == 0
    obs, info = games.reset(options={"reset_mask": mask})
    assert not obs[mask].any()
    assert not info["compromised"][mask].any()
    assert (obs[~mask] == before[~mask]).all()
    assert before[~mask].any()


@pytest.mark.parametrize("limit", [30, 100])
def test_the_limit_truncates_and_never_terminates(limit: int) -> None:
    games = Cage2Vector(3, max_episode_steps=limit)
    games.reset(seed=0)
    ends = [games.step(np.zeros(3, np.int64))[2:4] for _ in range(limit)]
    assert not any(terminated.any() for terminated, _ in ends)
    assert [bool(truncated.all()) for _, truncated in ends] == [False] * (limit - 1) + [True]


def test_one_game_is_a_lane_of_many() -> None:
    """This holds for a seed and for a stream."""
    one, many = gymnasium.make(NAME, red_agent="RedMeanderAgent"), Cage2Vector(4, "RedMeanderAgent")
    stream = training_episodes(4, 1)
    first, _ = one.reset(seed=stream.seed(0))
    many.reset(seed=[3, stream.seed(0), 5, 6])
    seeded = many.step(np.zeros(4, np.int64))[0][1]
    firsts, _ = many.reset(options={"seeds": [training_episodes(4, lane) for lane in range(4)]})
    assert (many.step(np.zeros(4, np.int64))[0][1] == seeded).all()
    many.reset(options={"seeds": [training_episodes(4, lane) for lane in range(4)]})
    assert (first == firsts[1]).all()
    for step, action in enumerate(np.random.default_rng(2).integers(145, size=100)):
        obs, reward, terminated, truncated, info = one.step(action)
        all_obs, rewards, _, _, infos = many.step(np.full(4, action))
        assert (obs == all_obs[1]).all()
        assert reward == rewards[1]
        assert (info["compromised"] == infos["compromised"][1]).all()
        assert (terminated, truncated) == (False, step == 99)
    one.close()


def test_gymnasium_accepts_it() -> None:
    env = gymnasium.make(NAME, memory=True)
    check_env(env.unwrapped, skip_render_check=True)
    env.close()
    vector = gymnasium.make_vec(NAME, 5, "vector_entry_point", red_agent="mixture")
    obs, _ = vector.reset(seed=1)
    assert vector.observation_space.contains(obs)
    assert vector.single_action_space == gymnasium.spaces.Discrete(145)
    vector.close()
    with pytest.raises(UsageError, match="B_lineAgent"):
        Cage2Vector(1, "B_lion")


def test_the_mixture_is_half_of_each() -> None:
    games = Cage2Vector(4000, "mixture")
    games.reset(seed=0)
    for _ in range(3):
        games.step(np.zeros(4000, np.int64))
    assert games.turn is not None
    exploiting = (games.turn.red_kind == EXPLOIT).mean()  # in the third step B_line exploits and Meander still scans
    assert exploiting == pytest.approx(0.5, abs=0.03)


def test_green_scans_one_host_every_other_step() -> None:
    games = Cage2Vector(4000, "SleepAgent", green=True)
    games.reset(seed=0)
    obs = games.step(np.zeros(4000, np.int64))[0].reshape(4000, 13, 4)
    assert obs[..., 1:].sum() == 0
    scanned = obs[..., 0]
    assert scanned.sum(axis=1).max() == 1
    for host, rate in dict(zip(HOSTS, scanned.mean(axis=0).tolist(), strict=True)).items():
        assert rate == pytest.approx(1 / 16 if host.startswith(("User", "Enterprise")) else 0.0, abs=0.016), host


def test_red_prefers_the_most_promising_exploit() -> None:
    chance = (np.arange(8000) + 0.5) / 8000
    ports = np.full(8000, sum(1 << PORTS.index(port) for port in (22, 80, 443, 3390, 25)), np.uint8)
    chosen = [PORTS[p] for p in choose_exploit(ports, chance)]
    rates = {port: chosen.count(port) / 8000 for port in set(chosen)}
    assert rates == pytest.approx({25: 0.75, 22: 0.0625, 80: 0.0625, 443: 0.0625, 3390: 0.0625}, abs=1e-3)
    no_web = np.full(8000, sum(1 << PORTS.index(port) for port in (22, 3390)), np.uint8)
    assert set(choose_exploit(no_web, chance).tolist()) == {PORTS.index(22)}, "SQL injection needs a web port"


def test_a_new_session_is_noticed_in_95_of_100() -> None:
    lanes = 10_000
    nets, everywhere = NetworkStates(lanes), np.ones(lanes, np.int64)
    user1 = HOSTS.index("User1")
    nets.scanned[:], nets.ports[:] = 1 << user1, 1 << PORTS.index(21)
    nets.blue(np.zeros(lanes, np.int64))
    success, _ = nets.red(everywhere * EXPLOIT, everywhere * user1, np.zeros(lanes), (np.arange(lanes) + 0.5) / lanes)
    obs = nets.observe().reshape(lanes, 13, 4)[:, user1]
    assert success.all()
    assert (obs == [1, 1, 0, 1]).all(axis=1).mean() == pytest.approx(0.95, abs=1e-3)
    assert (obs == [1, 0, 0, 0]).all(axis=1).mean() == pytest.approx(0.05, abs=1e-3)


def test_rendering_describes_each_step() -> None:
    env = gymnasium.make(NAME, render_mode="ansi")
    env.reset(seed=0)
    assert str(env.render()).split() == ["blue", "red", "cost", "total"]
    env.step(ACTIONS.index("Restore Op_Server0"))
    assert "  1 restores Op_Server0  " in str(env.render())
    assert "sweeps the User subnet" in str(env.render())
    assert str(env.render()).split()[-2:] == ["-1.0", "-1.0"]
    env.step(ACTIONS.index("DecoyVsftpd Enterprise1"))
    assert "no room: Vsftpd, Enterprise1" in str(env.render())
    env.close()


def action(name: str) -> NDArray:
    return np.array([ACTIONS.index(name)])


def seen(host: str = "", *, exploit: bool = False) -> NDArray:
    obs = np.zeros((1, 52), np.float32)
    if host:
        obs[0, 4 * HOSTS.index(host)] = 1.0
        obs[0, 4 * HOSTS.index(host) + 1] = exploit
    return obs


def nonzero(memory: BlueMemory) -> dict[str, float]:
    return {COLUMNS[c]: float(memory.columns[0, c]) for c in memory.columns[0].nonzero()[0]}


CANNOT_STAND = "DecoyFemitter Enterprise0", "DecoySSHD User1"  # another system; a port in use


@pytest.mark.parametrize(
    ("steps", "remembered"),
    [
        ([("DecoyApache Op_Server0", seen()), ("DecoyTomcat User1", seen())], "DecoyApache Op_Server0, DecoyTomcat User1"),
        ([("DecoyTomcat User1", seen()), ("Restore User1", seen())], "restored User1"),
        ([(name, seen()) for name in (*CANNOT_STAND, "DecoyVsftpd Op_Host0", "DecoyApache Op_Host0")], "DecoyVsftpd Op_Host0"),
        ([("Sleep", seen("User1")), ("Sleep", seen("User2", exploit=True))], "scanned User1"),  # an exploit is no scan
    ],
)  # fmt: skip
def test_what_is_remembered(steps: list[tuple[str, NDArray]], remembered: str) -> None:
    memory = BlueMemory(1)
    for name, obs in steps:
        memory.note(action(name), obs)
    assert nonzero(memory) == dict.fromkeys(remembered.split(", "), 1.0)


def test_scans_last_and_earlier() -> None:
    memory = BlueMemory(1)
    for host in ("User1", "Enterprise1"):
        memory.note(action("Sleep"), seen(host))
    assert nonzero(memory) == {"scanned User1": 0.5, "scanned Enterprise1": 1.0}


@pytest.mark.parametrize("red", ["B_lineAgent", "RedMeanderAgent"])
def test_it_knows_just_the_decoys_that_stand(red: str) -> None:
    games = Cage2Vector(64, red, memory=True)
    rng = np.random.default_rng(1)
    games.reset(seed=0)
    for _ in range(60):
        obs = games.step(rng.integers(145, size=64))[0]
    columns = obs[:, 52 : 52 + len(PLACES)]
    standing = np.zeros((64, 13), np.int64)
    for column, (_, host) in enumerate(PLACES):
        standing[:, host] += columns[:, column].astype(np.int64)
    true = games.nets.decoys.reshape(64, 13)
    assert ((standing > 0) == (true > 0)).all()
    vsftpd = [h for h in range(13) if (LAST_DECOY, h) not in PLACES]  # on other hosts it can be placed repeatedly
    assert (standing[:, vsftpd] == true[:, vsftpd]).all()
    assert standing.sum() > 100
