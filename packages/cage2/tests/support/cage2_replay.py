"""Replay recorded games of the official simulator with our network and red agents, and count the steps that agree exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from freewheel.core import NDArray
from freewheel.errors import SetupError
from freewheel_cage2.agents import BlineAgent, MeanderAgent
from freewheel_cage2.network import ESCALATE, EXPLOIT, NOTICED, PREFERENCE, UNKNOWN, NetworkStates
from freewheel_cage2.scenario import BIT, HOSTS, RED_KINDS, SUBNETS, N

#: Random numbers that lead to all possible outcomes: every exploit, noticed or not, and both kinds of session.
_EXPLOITS = [0.0, *(PREFERENCE + (1.0 - PREFERENCE) * (k + 0.5) / 14 for k in range(14))]  # there are at most 7 others
_NOTICES = [NOTICED / 2, (1.0 + NOTICED) / 2]
_EITHER = [0.0, 1.0 - 2.0**-32]


@dataclass(frozen=True)
class Replay:
    """The result of a replay: how well our network reproduces the recording."""

    steps: int
    exact: int  # steps whose observation, reward, outcomes and true state were reproduced
    foreseen: int  # steps in which our red agent could have done what red did
    difference: str = ""  # the first difference


def replay(path: Path) -> Replay:
    """Replay all games of a recording. The recording does not contain red's exploits or what blue noticed, so the replay follows
    all possibilities and drops those that differ from the recorded step. A step is exact if at least one possibility is left."""
    with np.load(path, allow_pickle=False) as file:
        record = {name: file[name] for name in file.files}
    games, steps = record["action"].shape
    reds = [_red_action(str(name)) for name in record["red_action_vocab"]]
    agent = json.loads(str(record["meta"]))["red_agent"]
    exact = foreseen = 0
    difference = ""
    for game in range(games):
        oracle = _Oracle(agent)
        for step, after in enumerate(_follow(record, game, reds)):
            if after.wrong:
                difference = difference or f"{path.name}, game {game}, step {step}: {after.wrong}"
                break
            exact += 1
            foreseen += oracle.foresaw(*reds[record["red_action"][game, step]])
            oracle.see(bool(record["red_success"][game, step] == 1), after)
    return Replay(games * steps, exact, foreseen, difference)


@dataclass(frozen=True)
class _After:
    """A replayed step."""

    nets: NetworkStates  # all states that agree with the recording so far
    shown: bool  # whether red's scan found anything
    wrong: str = ""  # what differs, if no state agrees


def _follow(record: Mapping[str, NDArray], game: int, reds: list[tuple[int, int]]) -> Iterator[_After]:
    nets = NetworkStates(1)
    if unlike := [name for name, same in _agreement(record, (game, 0), nets).items() if not same.all()]:
        yield _After(nets, False, f"already before it: {', '.join(unlike)}")
        return
    for step in range(record["action"].shape[1]):
        kind, target = reds[record["red_action"][game, step]]
        exploits, notices = _draws(kind)
        nets = nets.copies(np.repeat(np.arange(nets.lanes), len(exploits)))
        times = nets.lanes // len(exploits)
        every = np.ones(nets.lanes, np.int64)
        blue_success = nets.blue(every * record["action"][game, step])
        draws = np.tile(exploits, times), np.tile(notices, times)
        red_success, shown = nets.red(every * kind, every * target, *draws)
        nets.observe()
        agree = _agreement(record, (game, step + 1), nets)
        agree["reward"] = nets.reward() == record["reward"][game, step]
        agree["blue_success"] = blue_success == record["blue_success"][game, step]
        agree["red_success"] = np.where(every * kind == 0, UNKNOWN, red_success) == record["red_success"][game, step]
        same = np.logical_and.reduce(list(agree.values()))
        if not same.any():
            wrong = ", ".join(name for name, lanes in agree.items() if not lanes.any())
            yield _After(nets, False, wrong or "each for itself is possible, all together are not")
            return
        lanes = np.flatnonzero(same)
        nets = _different(nets, lanes)
        yield _After(nets, bool(shown[lanes[0]]))


def _draws(kind: int) -> tuple[NDArray, NDArray]:
    if kind == EXPLOIT:
        pairs = np.array([(exploit, notice) for exploit in _EXPLOITS for notice in _NOTICES])
    else:
        pairs = np.array([(0.0, chance) for chance in (_EITHER if kind == ESCALATE else _EITHER[:1])])
    return pairs[:, 0], pairs[:, 1]


def _agreement(record: Mapping[str, NDArray], at: tuple[int, int], nets: NetworkStates) -> dict[str, NDArray]:
    """Return for each quantity [B] whether each network agrees with the recording at this (game, index)."""
    ours = {
        "obs": nets.obs,
        "true_red_access": nets.access,
        "true_red_sessions": nets.sessions,
        "true_red_known": nets.among(nets.known),
        "true_red_scanned": nets.among(nets.scanned),
        "true_decoys": nets.decoys.reshape(-1, N),
        "true_malware_files": nets.files.reshape(-1, N),
        "true_otservice_up": nets.ot_up[:, None],
    }
    return {name: (values == record[name][at]).all(axis=1) for name, values in ours.items()}


def _different(nets: NetworkStates, lanes: NDArray) -> NetworkStates:
    """Remove duplicates. Networks with the same future count as one."""
    cells = [counts.reshape(-1, N)[lanes] for counts in (nets.root, nets.seen, nets.unseen, nets.ports)]
    _, first = np.unique(np.concatenate(cells, axis=1), axis=0, return_index=True)
    return nets.copies(lanes[first])


def _red_action(name: str) -> tuple[int, int]:
    """Return the kind and the target of an action."""
    kind, _, target = name.partition(" ")
    if kind not in RED_KINDS:
        raise SetupError(f"the recording knows an action of red's that we do not: {name}")
    if not target:
        return RED_KINDS.index(kind), 0
    return RED_KINDS.index(kind), SUBNETS.index(target) if target in SUBNETS else HOSTS.index(target)


class _Oracle:
    """Our red agent, which receives the recorded outcomes."""

    def __init__(self, agent: str) -> None:
        entries = len(BlineAgent.ENTRY)
        self._agent, self._meander, self._bline = agent, MeanderAgent(1), BlineAgent(entries)
        self._bline.begin(np.arange(entries), np.arange(entries) / entries)
        self._entered = np.ones(entries, np.bool_)  # hosts through which red may have entered
        self._success, self._shown, self._nets = False, True, NetworkStates(1)

    def foresaw(self, kind: int, target: int) -> bool:
        """Return whether red could take this action now."""
        if self._agent == "SleepAgent":
            return kind == 0
        if self._agent == "RedMeanderAgent":
            self._meander.learn(np.array([self._success]))
            kinds, options = self._meander.options(self._nets)
            self._meander.remember(np.array([kind]), np.array([target]))
            return bool(kinds[0] == kind and options[0] & BIT[target])
        kinds, targets = self._bline.act(
            np.full(len(self._entered), self._success), np.full(len(self._entered), self._shown)
        )
        self._entered &= (kinds == kind) & (targets == target)
        return bool(self._entered.any())

    def see(self, success: bool, after: _After) -> None:
        """Receive the outcome of the action."""
        self._success, self._shown, self._nets = success, after.shown, after.nets.copies(np.zeros(1, np.int64))
