"""The options of a federation and its file of sites: what they become, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from freewheel.cli.main import main
from freewheel.config import resolve
from freewheel.errors import ConsentError, UsageError
from freewheel_ray.federate.options import FederateOptions
from freewheel_ray.federate.site_config import read, site_of

ARGV = ["CartPole-v1", "--steps", "10000", "--ppo.lr", "1e-3", "--seed", "3"]


def site(table: dict[str, Any] | None = None, number: int = 0, argv: list[str] = ARGV, *, trust: bool = False) -> Any:
    return site_of({"name": "a", **(table or {})}, number, argv, trust=trust, source="sites.toml")


def config_of(found: Any, *, trust: bool = False) -> resolve.Config:
    return resolve.from_argv(list(found.words), trust=trust)


def test_sites_by_number_have_names_and_different_seeds() -> None:
    assert [table["name"] for table in read("3", 1)] == ["site-1", "site-2", "site-3"]
    assert (len(read("auto", 1)), len(read("auto", 7))) == (2, 7)
    seeds = {config_of(site(number=number)).run.seed for number in range(3)}
    assert len(seeds) == 3
    assert config_of(site()).run.evaluation.evals == 0, "the average is evaluated by the coordinator"
    assert site().steps == 10_000


def test_a_table_replaces_options_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "sites.toml"
    file.write_text(
        '[west]\nenv = "Acrobot-v1"\nsteps = 500\ncpus = 2\nresources = {w = 1}\nppo = {lr = 1e-4}\n'
        "[east]\nseed = 7\nenv_args = {max_episode_steps = 9}\n"
    )
    west, east = (site_of(table, number, ARGV, trust=False) for number, table in enumerate(read(str(file), 1)))
    one, other = config_of(west), config_of(east)
    assert (west.name, one.env.name, west.steps, one.learner.lr) == ("west", "Acrobot-v1", 500, 1e-4)  # type: ignore[attr-defined]
    assert west.place == {"cpus": 2.0, "resources": {"w": 1.0}}
    assert (other.run.seed, other.learner.lr, dict(other.env.args)) == (7, 1e-3, {"max_episode_steps": 9})  # type: ignore[attr-defined]


def test_code_that_a_file_names_needs_trust() -> None:
    own = {"env": "tests.support.worlds:Conditioned"}
    with pytest.raises(ConsentError, match=r"sites\.toml names code"):
        site(own)
    assert config_of(site(own, trust=True), trust=True).env.name == own["env"]
    typed = ["tests.support.worlds:Conditioned", "--steps", "100"]
    assert config_of(site(argv=typed)).env.name == own["env"], "what is typed is consent"


@pytest.mark.parametrize(
    ("table", "extra", "said"),
    [
        ({}, ["--minutes", "3"], "--federate does not go with --minutes: rounds are counted in steps"),
        ({}, ["--wandb"], "--federate does not go with --wandb: what a site measures would leave it"),
        ({}, ["--learners", "2"], "--federate does not go with --learners: a site has one learner"),
        ({}, ["--record-schedule"], "--federate does not go with --record-schedule"),
        ({"episodes": 3}, [], "site a does not go with --episodes"),
        ({"run": "x"}, [], "site a: leave out 'run'"),
        ({"nonsense": 1}, [], "site a: unknown option --nonsense"),
        ({"cpus": "many"}, [], "cpus of site a should be a number"),
        ({"steps": -1}, [], "site a: --steps must be positive"),
    ],
)
def test_what_makes_no_sense_at_a_site_is_refused(table: dict[str, Any], extra: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        site(table, argv=["CartPole-v1", *extra])
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "--sites must lie in 1..1000, not 0"),
        ("sites.json", "--sites takes a number, auto or a TOML file"),
        ("missing.toml", "--sites "),
    ],
)
def test_a_wrong_word_for_sites(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(text, 1)
    assert str(caught.value).startswith(said)


def test_a_file_without_tables_or_with_a_strange_name(tmp_path: Path) -> None:
    file = tmp_path / "sites.toml"
    for content, said in (("env = 'x'", "outside of a table"), ("['../x']", "use letters"), ("", "0 tables")):
        file.write_text(content)
        with pytest.raises(UsageError, match=said):
            read(str(file), 1)


def test_options_of_a_federation_need_one() -> None:
    with pytest.raises(UsageError, match="--min-sites is an option of --federate ROUNDS"):
        FederateOptions(min_sites=2)
    with pytest.raises(UsageError, match="--sites is an option of --federate"):
        FederateOptions(sites="3")
    assert FederateOptions(federate=1).time_limit is None
    assert FederateOptions(federate=1, round_timeout=2.0).time_limit == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--federate", "5", "--print-config"], "--federate is one run of many sites"),
        (["--federate", "0"], "--federate must be positive"),
        (["--federate", "50", "--steps", "1000"], "site site-1: 50 rounds of 1,000 steps have 20 each"),
        (["--federate", "2", "--sites", "2", "--min-sites", "3"], "--min-sites 3 is more than there are sites (2)"),
        (["--federate", "2", "--steps", "1e4", "--mode", "ray"], "--federate does not go with --mode ray"),
    ],
)
def test_commands_that_are_refused(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    assert main(["train", "CartPole-v1", *words]) == 2
    told = capfd.readouterr().err
    assert told.startswith(f"freewheel: {said}")
    assert told.count("\n") == 1


def test_a_plan_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "CartPole-v1", "--federate", "4", "--sites", "3", "--steps", "40000", "--dry-run"]) == 0
    assert "federate 4 rounds of 10,000 steps at each of 3 sites on a local Ray cluster: site-1, site-2, site-3" in (
        capfd.readouterr().out
    )
    assert not list(tmp_path.iterdir())
