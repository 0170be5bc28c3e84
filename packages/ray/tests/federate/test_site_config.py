"""The options of a federation and its file of sites: how they are read, and which are refused in one line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from freewheel.cli.main import main
from freewheel.config import resolve
from freewheel.errors import ConsentError, UsageError
from freewheel_ray.federate.options import FederateOptions
from freewheel_ray.federate.site_config import read, site_of
from tests.support.golden import assert_golden

ARGV = ["CartPole-v1", "--steps", "10000", "--ppo.lr", "1e-3", "--seed", "3"]


def site(table: dict[str, Any] | None = None, number: int = 0, argv: list[str] = ARGV, *, trust: bool = False) -> Any:
    return site_of({"name": "a", **(table or {})}, number, argv, trust=trust, source="sites.toml")


def config_of(found: Any, *, trust: bool = False) -> resolve.Config:
    return resolve.from_argv(list(found.words), trust=trust)


def test_sites_by_number_have_names_and_different_seeds() -> None:
    assert [table["name"] for table in read("3", 1)] == ["site-1", "site-2", "site-3"]
    assert (len(read("auto", 1)), len(read("auto", 7))) == (2, 7)
    assert len({config_of(site(number=number)).run.seed for number in range(3)}) == 3
    assert config_of(site()).run.evaluation.evals == 0, "the coordinator evaluates the average"
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
    assert config_of(site(argv=typed)).env.name == own["env"], "an option that was typed needs no further consent"


@pytest.mark.parametrize(
    ("table", "start"),
    [
        ({"nonsense": 1}, "site a: unknown option --nonsense"),
        ({"cpus": "many"}, "cpus of site a should be a number"),
        ({"steps": -1}, "site a: --steps must be positive"),
    ],
)
def test_a_mistake_in_a_table_names_its_site(table: dict[str, Any], start: str) -> None:
    with pytest.raises(UsageError) as caught:
        site(table, argv=["CartPole-v1"])
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


def test_what_is_refused_has_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that a site cannot have, wrong values of --sites, and files that are no tables of sites."""
    monkeypatch.chdir(tmp_path)
    options = ["--minutes=3", "--wandb", "--learners=2", "--record-schedule", "--mode=ray"]
    calls = [partial(site, argv=["CartPole-v1", option]) for option in options]
    calls += [partial(site, table) for table in ({"episodes": 3}, {"run": "x"})]
    calls += [partial(read, text, 1) for text in ("0", "sites.json")]
    for number, content in enumerate(("env = 'x'", "['../x']", "")):
        Path(f"{number}.toml").write_text(content)
        calls.append(partial(read, f"{number}.toml", 1))
    shown = []
    for call in calls:
        with pytest.raises(UsageError) as caught:
            call()
        shown.append(str(caught.value))
    assert_golden(__file__, "refused_sites", "\n".join(shown) + "\n")


def test_a_missing_file_is_named_with_its_option() -> None:
    with pytest.raises(UsageError, match=r"^--sites .*missing\.toml"):
        read("missing.toml", 1)


def test_options_of_a_federation_need_one() -> None:
    with pytest.raises(UsageError, match="--min-sites is an option of --federate ROUNDS"):
        FederateOptions(min_sites=2)
    with pytest.raises(UsageError, match="--sites is an option of --federate"):
        FederateOptions(sites="3")
    assert FederateOptions(federate=1).time_limit is None
    assert FederateOptions(federate=1, round_timeout=2.0).time_limit == 2


def test_refused_commands_have_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    for words in (
        ["--federate", "5", "--print-config"],
        ["--federate", "50", "--steps", "1000"],
        ["--federate", "2", "--sites", "2", "--min-sites", "3"],
        ["--federate", "2", "--steps", "1e4", "--mode", "ray"],
    ):
        assert main(["train", "CartPole-v1", *words]) == 2
    assert_golden(__file__, "refused_commands", capfd.readouterr().err)
    assert main(["train", "CartPole-v1", "--federate", "0"]) == 2
    assert capfd.readouterr().err.startswith("freewheel: --federate must be positive")


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
