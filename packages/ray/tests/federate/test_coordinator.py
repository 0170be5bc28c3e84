"""The coordinator with sites that do not fit, send invalid bytes, fail or are lost, and the contents of its rows and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest

from freewheel.core import NDArray
from freewheel.envs.spaces import layout_of
from freewheel.errors import FreewheelError, SetupError
from freewheel_ray.actors.node_processes import ProcessReply
from freewheel_ray.federate.coordinator import Coordinator, line
from freewheel_ray.federate.message import Kind, SiteMessage, unpack
from freewheel_ray.federate.options import FederateOptions
from freewheel_ray.federate.rounds import RoundResult
from freewheel_ray.federate.site_config import SiteConfig

BASE: dict[str, NDArray] = {"policy.w": np.ones(4, np.float32)}
Reply = Callable[
    [SiteMessage], "SiteMessage | bytes | None"
]  # answers a message; None: the site does not answer, b"": it is lost


class Line:
    """Passes bytes to functions. Implements coordinator.SiteTransport."""

    def __init__(self, sites: dict[str, Reply]) -> None:
        self.sites, self._came = sites, list[ProcessReply]()
        self.dropped: list[str] = []

    def ask(self, names: Sequence[str], data: bytes) -> None:
        kinds: tuple[Kind, ...] = ("order", "round")
        for name in names:
            found = self.sites[name](unpack(data, "the coordinator", *kinds))
            if found is not None:
                packed = found if isinstance(found, bytes) else found.pack()
                self._came.append(ProcessReply(name, packed, "" if packed else "its node is gone"))

    def answers(self, seconds: float) -> list[ProcessReply]:
        came, self._came = self._came, []
        return came

    def drop(self, name: str) -> None:
        self.dropped.append(name)


def spaces(columns: int) -> dict[str, Any]:
    return layout_of(gymnasium.spaces.Box(-1, 1, (columns,)), gymnasium.spaces.Discrete(2)).to_json()


def good(frame: SiteMessage) -> SiteMessage:
    """Double the weights of the message."""
    if frame.kind == "order":
        return SiteMessage("ready", {"spaces": spaces(3)}, BASE)
    return learned(10, {name: 2 * value for name, value in frame.arrays.items()}, frame.values["round"])


def learned(rows: Any, arrays: dict[str, NDArray], number: int = 1) -> SiteMessage:
    return SiteMessage("learned", {"round": number, "rows": rows}, arrays)


def replaced(frame: SiteMessage, **values: Any) -> SiteMessage:
    return SiteMessage(frame.kind, {**frame.values, **values}, frame.arrays) if frame.kind == "learned" else frame


class Federation:
    def __init__(self, sites: dict[str, Reply], **options: Any) -> None:
        self.line, self.started = Line(sites), list[str]()
        chosen = FederateOptions(federate=10, **options)
        self.coordinator = Coordinator([SiteConfig(name, (), 100) for name in sites], chosen, spaces(3), "sites")

    def join(self) -> None:
        self.coordinator.join(self.line, lambda: None, self.started.append)

    def round(self) -> tuple[RoundResult, dict[str, Any]]:
        outcome = self.coordinator.round(self.line, lambda: None, self.started.append)
        assert outcome is not None
        return outcome, self.coordinator.adopt(outcome)


def test_rounds_follow_one_another_from_the_average() -> None:
    federation = Federation({"a": good, "b": good})
    federation.join()
    rows = [federation.round()[1] for _ in range(3)]
    assert federation.coordinator.base["policy.w"].tolist() == [8.0] * 4
    assert [(row["round"], row["env_steps"], row["sites"], row["distance"]) for row in rows] == [
        (1, 20, 2, 0.0), (2, 40, 2, 0.0), (3, 60, 2, 0.0)
    ]  # fmt: skip
    about = federation.coordinator.about()
    assert (about["round"], about["env_steps"], about["sites"]["a"]["rows"]) == (3, 60, 30)
    assert line(rows[0], 10, 2, 1.0).startswith("round 1 of 10  2 of 2 sites  20 rows")
    assert line(rows[0], 10, 2, 20.0).endswith("left 3:00")


def test_a_site_with_other_spaces_is_refused_before_the_first_round() -> None:
    def other(frame: SiteMessage) -> SiteMessage:
        return SiteMessage("ready", {"spaces": spaces(5)}, BASE)

    with pytest.raises(SetupError, match=r"^site b cannot take part: .* reads 'obs' Box\(-1.0, 1.0, \(3,\)[^\n]*$"):
        Federation({"a": good, "b": other}).join()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (SiteMessage("ready", {"spaces": {}}, BASE), "the spaces of b"),
        (SiteMessage("ready", {"spaces": spaces(3)}), "it sent no weights"),
        (SiteMessage("ready", {"spaces": spaces(3)}, {"policy.w": np.ones(5, np.float32)}), "should be (4,) float32"),
        (SiteMessage("failed", {"problem": "unknown option --x"}), "unknown option --x"),
        (b"nonsense", "not JSON"),
    ],
)
def test_a_site_that_cannot_start_is_reported_in_one_line(answer: SiteMessage | bytes, said: str) -> None:
    with pytest.raises(SetupError, match="site b cannot take part") as caught:
        Federation({"a": good, "b": lambda _: answer}).join()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "reason", "said"),
    [
        (learned(10, {"policy.w": np.full(4, np.nan, np.float32)}), "invalid", "not finite"),
        (learned(10, {}), "invalid", "no weights"),
        (learned("many", BASE), "invalid", "rows of b should be"),
        (learned(-5, BASE), "empty", ""),
        (learned(10**18, BASE), "invalid",
         "b claims 1,000,000,000,000,000,000 rows in a round, but has only 100 steps for all rounds"),
        (b"\x80\x04K\x01.", "invalid", "not text"),
        (SiteMessage("failed", {"problem": "ZeroDivisionError"}), "lost", "its training failed: ZeroDivisionError"),
        (b"", "lost", "its node is gone"),
    ],
)  # fmt: skip
def test_anything_but_weights_is_skipped_and_counted(answer: SiteMessage | bytes, reason: str, said: str) -> None:
    def bad(frame: SiteMessage) -> SiteMessage | bytes:
        return answer if frame.kind == "round" and frame.values["round"] == 1 else good(frame)

    federation = Federation({"a": good, "b": bad})
    federation.join()
    outcome, row = federation.round()
    assert (outcome.counted, row["skipped"], row["rows"]) == (("a",), {"b": reason}, 10)
    assert federation.coordinator.base["policy.w"].tolist() == [2.0] * 4, "the average of the other"
    assert said in federation.coordinator.rounds.sites["b"].problem
    assert federation.line.dropped == (["b"] if reason == "lost" else [])
    while (outcome := federation.round()[0]).skipped:
        assert outcome.round < 5
    assert federation.started == ["a", "b", "b"] if reason == "lost" else ["a", "b"]
    assert federation.coordinator.summary()["rounds_skipped"][reason] == 1


def test_a_site_counts_for_twice_its_round_at_most() -> None:
    federation = Federation({"a": good, "b": lambda frame: replaced(good(frame), rows=150)})
    federation.join()
    _, row = federation.round()
    assert row["rows"] == 10 + 20


def test_sites_that_have_not_rejoined_are_named() -> None:
    def dies(frame: SiteMessage) -> SiteMessage | bytes | None:
        return (good(frame) if federation.started.count("b") < 2 else None) if frame.kind == "order" else b""

    federation = Federation({"a": good, "b": dies})
    federation.join()
    federation.round()
    assert federation.coordinator.absent() == ["b: it was lost and not started again (its node is gone)"]
    federation.round()
    assert federation.started == ["a", "b", "b"]
    assert federation.coordinator.absent() == [
        "b: it was lost, and had not answered again when the last round ended (its node is gone)"
    ]


def test_no_site_left_ends_it_with_what_was_wrong() -> None:
    def dies(frame: SiteMessage) -> SiteMessage | bytes:
        return good(frame) if frame.kind == "order" else b""

    federation = Federation({"a": dies}, site_restarts=1)
    federation.join()
    with pytest.raises(FreewheelError, match="no site is left: a: its node is gone"):
        list(map(Federation.round, [federation] * 5))
    assert federation.started == ["a", "a"]


def test_too_few_answers_leave_the_average_as_it_was() -> None:
    federation = Federation({"a": good, "b": lambda frame: good(frame) if frame.kind == "order" else b""}, min_sites=2)
    federation.join()
    outcome, row = federation.round()
    assert (outcome.enough, row["averaged"], row["distance"], row["env_steps"]) == (False, False, None, 0)
    assert federation.coordinator.base["policy.w"].tolist() == [1.0] * 4
    assert "too few for an average" in line(row, 10, 2, 1.0)


def test_returns_are_taken_only_where_they_were_asked_for() -> None:
    def tells(frame: SiteMessage) -> SiteMessage:
        found = good(frame)
        return SiteMessage(found.kind, {**found.values, "return": 7.5, "episodes": 4}, found.arrays)

    for report, expected in (("nothing", None), ("returns", 7.5)):
        federation = Federation({"a": tells}, site_report=report)
        federation.join()
        assert federation.round()[1].get("return_mean") == expected
