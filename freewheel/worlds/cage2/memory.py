"""Memory: what a defender of Scenario 2 can know from its own actions and sightings, as columns beside the observation."""

from __future__ import annotations

import numpy as np

from freewheel.core import NDArray
from freewheel.worlds.cage2.scenario import (
    FIRST_DECOY,
    FITS,
    HOST_OF,
    HOSTS,
    LAST_DECOY,
    NEEDS,
    OPEN,
    OPENS,
    RESTORE,
    VERB_OF,
    VERBS,
    N,
)

#: (verb, host) of every decoy that can stand somewhere: its system fits and its port is free at the start.
PLACES = [
    (verb, host)
    for host in range(N)
    for verb in range(FIRST_DECOY, LAST_DECOY + 1)
    if FITS[verb, host] and not OPEN[host] & NEEDS[verb]
]
COLUMNS = (
    *(f"{VERBS[verb - 2]} {HOSTS[host]}" for verb, host in PLACES),
    *(f"scanned {host}" for host in HOSTS),
    *(f"restored {host}" for host in HOSTS),
)
_PLACE = np.full((RESTORE + 1, N), -1)  # [verb, host] its column
for _column, (_verb, _host) in enumerate(PLACES):
    _PLACE[_verb, _host] = _column
_AT = np.array([host for _, host in PLACES])
LATEST, EARLIER = 1.0, 0.5  # how a scan is remembered


class Memory:
    """[B, 67]: decoys that stand (they are known without being told: their conditions are), where red has scanned, last and
    before, and which hosts were ever restored."""

    def __init__(self, lanes: int) -> None:
        self.columns = np.zeros((lanes, len(COLUMNS)), np.float32)
        self._decoys = self.columns[:, : len(PLACES)]
        self._scanned = self.columns[:, len(PLACES) : len(PLACES) + N]
        self._restored = self.columns[:, len(PLACES) + N :]
        self._ports = np.tile(OPEN, (lanes, 1))  # [B, 13] ports in use

    def begin(self, lanes: NDArray) -> None:
        """Forget: new games in these lanes."""
        self.columns[lanes] = 0.0
        self._ports[lanes] = OPEN

    def note(self, action: NDArray, obs: NDArray) -> None:
        """What was done [B], and what was seen of it [B, 52]."""
        verb, host = VERB_OF[action], HOST_OF[action]
        if (lanes := np.flatnonzero(verb == RESTORE)).size:
            at = host[lanes]
            self._ports[lanes, at] = OPEN[at]
            self._restored[lanes, at] = 1.0
            self._decoys[lanes] *= at[:, None] != _AT
        column = _PLACE[verb, host]
        lanes = np.flatnonzero((column >= 0) & (self._ports[np.arange(len(host)), host] & NEEDS[verb] == 0))
        self._ports[lanes, host[lanes]] |= OPENS[verb[lanes]]
        self._decoys[lanes, column[lanes]] = 1.0
        activity = obs[:, : 4 * N].reshape(-1, N, 4)
        scans = (activity[..., 0] == 1) & (activity[..., 1] == 0)
        fresh = scans.any(axis=1)
        self._scanned[fresh] = np.where(scans[fresh], LATEST, np.minimum(self._scanned[fresh], EARLIER))
