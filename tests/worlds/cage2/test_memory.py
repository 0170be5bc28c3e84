"""What a defender remembers: decoys that stand, scans, restored hosts; no more than it could know."""

from __future__ import annotations

import numpy as np
import pytest

from freewheel.core import NDArray
from freewheel.worlds.cage2.env import COLUMNS, PLACES, Cage2Vector, Memory
from freewheel.worlds.cage2.scenario import ACTIONS, HOSTS, LAST_DECOY


def action(name: str) -> NDArray:
    return np.array([ACTIONS.index(name)])


def seen(host: str = "", *, exploit: bool = False) -> NDArray:
    obs = np.zeros((1, 52), np.float32)
    if host:
        obs[0, 4 * HOSTS.index(host)] = 1.0
        obs[0, 4 * HOSTS.index(host) + 1] = exploit
    return obs


def told(memory: Memory) -> dict[str, float]:
    return {COLUMNS[c]: float(memory.columns[0, c]) for c in memory.columns[0].nonzero()[0]}


def test_a_decoy_is_remembered_until_its_host_is_restored() -> None:
    memory = Memory(1)
    memory.note(action("DecoyApache Op_Server0"), seen())
    memory.note(action("DecoyTomcat User1"), seen())
    assert told(memory) == {"DecoyApache Op_Server0": 1.0, "DecoyTomcat User1": 1.0}
    memory.note(action("Restore Op_Server0"), seen())
    assert told(memory) == {"DecoyTomcat User1": 1.0, "restored Op_Server0": 1.0}


def test_a_decoy_that_cannot_stand_is_not_remembered() -> None:
    memory = Memory(1)
    for name in ("DecoyFemitter Enterprise0", "DecoySSHD User1", "DecoyVsftpd Op_Host0", "DecoyApache Op_Host0"):
        memory.note(action(name), seen())
    assert told(memory) == {"DecoyVsftpd Op_Host0": 1.0}, "wrong system; port in use; port taken by the one before"


def test_scans_last_and_earlier() -> None:
    memory = Memory(1)
    memory.note(action("Sleep"), seen("User1"))
    memory.note(action("Sleep"), seen("User2", exploit=True))
    assert told(memory) == {"scanned User1": 1.0}, "an exploit is no scan"
    memory.note(action("Sleep"), seen("Enterprise1"))
    assert told(memory) == {"scanned User1": 0.5, "scanned Enterprise1": 1.0}


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
    vsftpd = [h for h in range(13) if (LAST_DECOY, h) not in PLACES]  # elsewhere it can be put up again and again
    assert (standing[:, vsftpd] == true[:, vsftpd]).all()
    assert standing.sum() > 100


def test_a_new_game_forgets() -> None:
    games = Cage2Vector(2, memory=True)
    games.reset(seed=0)
    games.step(np.array([ACTIONS.index("DecoyApache Op_Server0")] * 2))
    obs, _ = games.reset(options={"reset_mask": np.array([True, False])})
    assert not obs[0].any()
    assert obs[1].any()
