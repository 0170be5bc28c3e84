"""The weights that act when a run goes on are those that were posted, also if its learner has moved on since."""

from __future__ import annotations

import numpy as np

from freewheel.core import Snapshot
from freewheel.pacing.posted import Posted


def weights(version: int, value: float) -> Snapshot:
    return Snapshot(version, {"actor.0.weight": np.full(3, value, np.float32)}, np.full((2, 1), value, np.float32))


def values(snapshots: list[Snapshot]) -> list[tuple[int, float, float]]:
    return [(one.version, float(one.params["actor.0.weight"][0]), float(one.context[0, 0])) for one in snapshots]


def test_the_two_newest_are_kept_and_come_back_in_place_of_what_the_learner_has_now() -> None:
    first = Posted()
    assert [values(first.post(weights(version, version / 8))) for version in range(3)] == [
        [(0, 0.0, 0.0)], [(1, 0.125, 0.125)], [(2, 0.25, 0.25)],
    ]  # fmt: skip
    second = Posted()
    second.restore(first.state())
    assert second.state().keys() == first.state().keys(), "before anything is posted, too"
    assert values(second.post(weights(2, 9.0))) == [(1, 0.125, 0.125), (2, 0.25, 0.25)]
    assert values(second.post(weights(3, 9.0))) == [(3, 9.0, 9.0)]
    third = Posted()
    third.restore(second.state())
    assert values(third.post(weights(3, 0.0))) == [(2, 0.25, 0.25), (3, 9.0, 9.0)]


def test_another_version_is_posted_as_it_is() -> None:
    first, second = Posted(), Posted()
    first.post(weights(2, 0.25))
    second.restore(first.state())
    assert values(second.post(weights(3, 1.0))) == [(3, 1.0, 1.0)]
    assert values(second.post(weights(2, 2.0))) == [(2, 2.0, 2.0)], "what was restored is gone"
