"""Campaigns of other packages: which one a command line asks for, what it is given, and which runs are its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from freewheel.cli import campaigns, main
from freewheel.cli.campaigns import Campaign, CampaignRequest
from freewheel.errors import UsageError


@dataclass(frozen=True)
class Sweep:
    """Options of the first one."""

    sweep: str = ""
    """What is swept."""
    width: int = 3
    """How wide."""


@dataclass(frozen=True)
class Relay:
    """Options of the second one."""

    relay: int | None = None
    """How many runs follow each other."""


@dataclass
class Calls:
    """What the campaigns were asked to do."""

    trained: list[tuple[Any, CampaignRequest]] = field(default_factory=list)
    resumed: list[tuple[str, bool]] = field(default_factory=list)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()

    def train(options: Any, request: CampaignRequest) -> int:
        found.trained.append((options, request))
        return 7

    def resume(path: Path, trust: bool) -> int:
        found.resumed.append((path.name, trust))
        return 8

    sweep = Campaign(name="sweep", options=Sweep, train=train)
    relay = Campaign(
        name="relay", options=Relay, train=train, owns=lambda path: (path / "relay").exists(), resume=resume
    )
    registry: dict[str, Campaign] = {"sweep": sweep, "relay": relay}
    monkeypatch.setattr(campaigns, "CAMPAIGNS", registry)
    return found


def test_the_option_of_a_campaign_starts_it_with_the_words_of_its_trainings(calls: Calls) -> None:
    words = "train CartPole-v1 --sweep lr --seed 3 --width 5 --steps 100 --trust"
    assert main.main(words.split()) == 7
    ((options, request),) = calls.trained
    assert options == Sweep("lr", 5)
    rest = ["CartPole-v1", "--seed", "3", "--steps", "100"]
    assert request == CampaignRequest(rest, dry_run=False, print_config=False, trust=True)


def test_two_campaigns_at_once_are_refused(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["train", "CartPole-v1", "--sweep", "lr", "--relay", "2"]) == 2
    assert capsys.readouterr().err == "freewheel: give --sweep or --relay, not both\n"
    assert calls.trained == []


def test_a_campaign_does_not_go_with_resume(calls: Calls) -> None:
    with pytest.raises(UsageError, match="leave out --sweep, --relay, --dry-run and --print-config"):
        main.COMMANDS["train"].run(["--resume", "old", "--relay", "2"])
    assert calls.trained == []


def test_the_help_of_train_has_the_options_of_campaigns(calls: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(["train", "--help"]) == 0
    shown = capfd.readouterr().out
    assert "--sweep" in shown
    assert "How many runs follow each other." in shown


def test_resume_gives_a_campaign_its_own_run(calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one" / "relay").mkdir(parents=True)
    (tmp_path / "one" / "config.json").write_text("{}")
    words = ["resume", "one", "--runs-dir", str(tmp_path)]
    assert main.main([*words, "--trust"]) == 8
    assert calls.resumed == [("one", True)]
    assert main.main([*words, "--steps", "5"]) == 2
    assert "one is a run of --relay and keeps the options it has" in capsys.readouterr().err
