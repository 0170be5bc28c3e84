"""R17: what a file says is data. Hostile run directories and configs end in one line of ours, run nothing and write nothing."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import freewheel
from freewheel.cli import main as cli
from freewheel.config.resolve import from_argv, from_file
from freewheel.errors import ConsentError, FreewheelError
from freewheel.rollout.probe import EnvCost
from freewheel.run.naming import name_run
from freewheel.run.planning import arrange, survey_env
from tests.support.hostile import CANARY, CHECKPOINTS, CODE, CONFIGS, MODULES, PAYLOAD
from tests.support.places import LONG
from tests.support.runs import good_run, train

Capture: TypeAlias = pytest.CaptureFixture[str]
ALL = {**CONFIGS, **CODE, **CHECKPOINTS, **MODULES}
UNUSED = ("policy: layout", "policy: no version", "policy: version")  # by a run that begins with the weights
FOREIGN = re.compile(r"Traceback|Error:|Exception|KeyError|object is not|unexpected keyword")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that names no code."""
    return good_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def cost() -> EnvCost:
    return survey_env(from_argv(["CartPole-v1"]), budget=0.02)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with a module whose import would be noticed."""
    (tmp_path / "payload.py").write_text(PAYLOAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("payload", None)


def outcome(argv: list[str], capfd: Capture) -> tuple[int, str]:
    return cli.main(argv), capfd.readouterr().err


def assert_one_line(code: int, text: str) -> None:
    assert code in (1, 2), text
    first, *rest = text.rstrip("\n").splitlines()
    assert first.startswith("freewheel: "), text
    assert all(line.startswith("  ") for line in rest), text  # the checkpoints that were tried
    assert not FOREIGN.search(text), text
    assert all(len(line) < 600 for line in (first, *rest)), text


@pytest.mark.parametrize("name", ALL)
def test_a_hostile_run_directory_is_refused_in_one_line(
    name: str, good: Path, here: Path, cost: EnvCost, capfd: Capture
) -> None:
    run = here / "runs" / "one"
    shutil.copytree(good, run, symlinks=True)
    ALL[name](run)
    before = {path: path.lstat().st_mtime_ns for path in sorted(here.rglob("*"))}
    began = time.process_time()
    commands = ["eval", "play"] if LONG else ["eval"]  # the same door
    if name in CONFIGS or name in CODE:  # what it needs of a checkpoint is the learner's own (tests/run/test_resume.py)
        commands.append("resume")
    for command in commands:
        more = {"play": ["--render", "none"], "eval": ["--episodes", "1"]}.get(command, [])
        assert_one_line(*outcome([command, "one", *more], capfd))
    for use in (lambda: freewheel.load(run), lambda: _begin_with(run, cost)):
        try:
            use()
            assert name not in CHECKPOINTS or name.startswith(UNUSED), "its weights were used"
        except FreewheelError as error:
            assert_one_line(error.exit_code, f"freewheel: {error}")
    assert time.process_time() - began < 10
    sys.modules.pop("payload", None)
    after = {path: path.lstat().st_mtime_ns for path in sorted(here.rglob("*")) if "__pycache__" not in path.parts}
    assert not (here / CANARY).exists(), "it ran code"
    assert after == before, "it wrote something"


def _begin_with(run: Path, cost: EnvCost) -> None:
    config = from_argv(["CartPole-v1", "--init", str(run), "--mode", "sequential", "--policy.hidden", "8", "8"])
    arrange(config, cost, name_run(config), "cpu")


def test_the_good_one_is_played(good: Path, here: Path, cost: EnvCost, capfd: Capture) -> None:
    shutil.copytree(good, here / "runs" / "one", symlinks=True)
    assert outcome(["eval", "one", "--episodes", "1"], capfd) == (0, "")
    assert freewheel.load(here / "runs" / "one").env == "CartPole-v1"
    _begin_with(here / "runs" / "one", cost)


@pytest.mark.parametrize("name", [*CODE, *MODULES])
def test_code_is_refused_by_its_name_and_os_system_always(name: str, good: Path, here: Path, capfd: Capture) -> None:
    run = here / "runs" / "one"
    shutil.copytree(good, run, symlinks=True)
    ALL[name](run)
    code, text = outcome(["eval", "one"], capfd)
    assert (code, "--trust" in text) == (2, True), text
    assert ("env" in text) or ("policy.module" in text)
    if "os:system" in name or "subprocess" in name:
        code, text = outcome(["eval", "one", "--trust"], capfd)
        assert (code, "is a part of Python" in text) == (1, True), text
    assert not (here / CANARY).exists()


CONFIG_PAYLOADS: Mapping[str, dict[str, Any]] = {
    "env": {"env": "payload:World"},
    "a file": {"env": "payload.py"},
    "hooks": {"env": "CartPole-v1", "hooks": ["payload:Listener"]},
    "network": {"env": "CartPole-v1", "policy": {"module": "payload:Net"}},
    "reward": {"env": "Pendulum-v1", "algo": "mbpo", "mbpo": {"reward": "payload:reward"}},
    "termination": {"env": "Pendulum-v1", "algo": "mbpo", "mbpo": {"termination": "payload:reward"}},
    "os.system": {"env": "os:system", "env_args": {"command": f"touch ./{CANARY}"}},
    "runs elsewhere": {"env": "CartPole-v1", "runs_dir": "../elsewhere"},
}


@pytest.mark.parametrize("name", CONFIG_PAYLOADS)
@pytest.mark.parametrize("more", [["--dry-run"], [], ["--seeds", "1..2", "--dry-run"]])
def test_a_config_file_is_data_too(name: str, more: list[str], here: Path, capfd: Capture) -> None:
    (here / "c.json").write_text(json.dumps(CONFIG_PAYLOADS[name] | {"steps": 10}))
    assert_one_line(*outcome(["train", "--config", "c.json", *more], capfd))
    assert sorted(path.name for path in here.iterdir()) == ["c.json", "payload.py"]
    if name not in ("env", "a file"):  # which the argument replaces
        with pytest.raises(ConsentError):
            freewheel.train("CartPole-v1", config="c.json", quiet=True)


def test_a_config_can_be_looked_at_without_consent(here: Path, capfd: Capture) -> None:
    (here / "c.json").write_text('{"env": "payload:World", "steps": 10}')
    assert outcome(["train", "--config", "c.json", "--print-config"], capfd) == (0, "")
    assert not (here / CANARY).exists()


def test_what_is_typed_is_consent_and_replaces_what_a_file_names(here: Path) -> None:
    (here / "c.json").write_text('{"env": "payload:World", "hooks": ["payload:Listener"], "steps": 10}')
    told = r"c\.json names code .*, hooks 'payload:Listener', and it was not written by you"
    with pytest.raises(ConsentError, match=told):
        from_argv(["CartPole-v1", "--config", "c.json"])
    assert from_argv(["CartPole-v1", "--config", "c.json", "--hooks", "mine:Hook"]).run.hooks == ("mine:Hook",)
    assert from_argv(["--config", "c.json"], trust=True).env.label == "payload:World"


def test_a_file_that_a_config_names_is_held_to_the_same(here: Path) -> None:
    (here / "a.json").write_text('{"config": "b.json", "steps": 10}')
    (here / "b.json").write_text('{"env": "payload:World"}')
    with pytest.raises(ConsentError, match=r"b\.json names code"):
        from_file(here / "a.json")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with code of the user's: the environment and the network."""
    network = {"module": "tests.support.custom_module:Shared"}
    return train(tmp_path_factory.mktemp("runs"), run="own", steps=64, evals=0, mode="sequential", policy=network).path


def test_a_run_that_was_made_here_needs_no_consent_wherever_it_lies(own: Path, tmp_path: Path) -> None:
    shutil.copytree(own, tmp_path / "moved", symlinks=True)
    assert freewheel.score(tmp_path / "moved", episodes=1, which="latest").lengths
    assert freewheel.load(tmp_path / "moved", "latest").spec.module


def test_runs_of_another_user_or_host_need_consent(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from freewheel.files import signatures

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    monkeypatch.setattr(signatures, "_own_key", lambda: b"?" * 32)
    with pytest.raises(ConsentError, match=r"config\.json names code .*env 'tests\.support\.worlds:Identity'"):
        freewheel.score(own, episodes=1, which="latest")
    with pytest.raises(ConsentError, match=r"policy\.json names code .*policy\.module"):
        freewheel.load(own, "latest")
    assert freewheel.score(own, episodes=1, which="latest", trust=True).lengths
    assert freewheel.load(own, "latest", trust=True).spec.module
    assert not (tmp_path / "other").exists(), "reading makes no key"


def test_a_run_that_was_changed_needs_consent(own: Path, tmp_path: Path) -> None:
    run = tmp_path / "changed"
    shutil.copytree(own, run, symlinks=True)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"env": "tests.support.worlds:Other"}))
    with pytest.raises(ConsentError):
        freewheel.score(run, episodes=1)
