"""The command line: what it answers, and that every mistake costs one line and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium
import pytest

from freewheel.cli import main as cli
from freewheel.cli.eval import EvalCommandOptions
from freewheel.cli.play import PlayOptions
from freewheel.collect.lockstep import LockstepConfig
from freewheel.collect.mode import MODES
from freewheel.config import find, flags, resolve
from freewheel.config.resolve import RunConfig, presets
from freewheel.core import LEARNER_TIME, WORKER_TIME
from freewheel.envs.family import WORLDS as FAMILIES
from freewheel.envs.gym import GymOptions
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.spec import ALGORITHMS
from freewheel.policies.spec import PolicyConfig
from tests.support.places import ROOT
from tests.support.runs import python

Capture: TypeAlias = pytest.CaptureFixture[str]
WORLDS = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Text

class World(gymnasium.Env):
    observation_space, action_space = Box(-1, 1, (2,), np.float32), Discrete(2)

    def __init__(self, size=1, some_key=0):
        assert some_key in (0, 7)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, True, {}

class Speaks(World):
    observation_space = Text(5)

class Chords(World):
    action_space = MultiBinary(3)

class Nested(World):
    action_space = Dict(a=Discrete(2))

class Spaceless(gymnasium.Env):
    pass

def nothing():
    return None
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for runs, beside modules of worlds that can be imported."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "bad_worlds.py").write_text(WORLDS)
    (tmp_path / "modules" / "needy_world.py").write_text("import no_such_package_anywhere\nWorld = None\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "bad_worlds", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def shell(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "freewheel", *argv]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), "modules"])}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=55, check=False)


#: How main() reports them; tests/config has all refusals of options.
USAGE = [
    ("trian", "unknown command 'trian'; did you mean 'train'?"),
    ("train", "which environment? name one, e.g. CartPole-v1"),
    ("train A-v0 B-v0", "give one environment, not A-v0 B-v0"),
    ("train CartPole-v1 --dry-rum", "unknown option --dry-rum; "),
    ("train CartPole-v1 --preset cartpole --minutes 1", "ppo.lr_schedule linear needs --steps"),
    ("train CartPole-v1 --config nosuch.json", "--config nosuch.json cannot be read: No such file or directory; "),
    ("eval", "which run? freewheel eval NAME, a directory under runs/"),
    ("eval nosuch", "no run 'nosuch' in runs; train one first"),
    ("play a b", "give one run, not a b"),
    ("eval a --episodes 0", "--episodes must be positive, not 0"),
    ("play nosuch --render film", "--render must be one of auto, human, ansi, gif, mp4, png, none, not film"),
    ("doctor --all", "unknown option --all; see --help"),
]
SETUP = [
    ("CartPole-v9", "unknown environment 'CartPole-v9'; did you mean 'CartPole-v1'?"),
    ("Nope-v0", "unknown environment 'Nope-v0'; python -c 'import gymnasium; "),
    ("bad_worlds:nothing", "bad_worlds:nothing returned NoneType: it has to return an environment of Gymnasium or"),
    ("bad_worlds:Speaks", "observation space Text(1, 5, "),
    ("bad_worlds:Chords", "action space MultiBinary(3) is not supported: use Box or Discrete"),
    ("bad_worlds:Nested", "action space Dict('a': Discrete(2)) is not supported: use Box or Discrete"),
    ("bad_worlds:Spaceless", "lane 0 of bad_worlds:Spaceless does not define its spaces"),
    ("CartPole-v1 --red-agent SleepAgent", "CartPole-v1 does not accept the arguments {'red_agent': 'SleepAgent'}"),
    ("bad_worlds:World --policy.head gaussian", "policy.head gaussian does not fit the actions of"),
]
MEASURING = r"(loading \.\.\.\n)?(measuring \S+ \.\.\.\n)?"  # what may be printed before an answer


def assert_one_line(err: str, text: str) -> None:
    assert err.startswith(f"freewheel: {text}")
    assert err.endswith("\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("argv", "text"), USAGE)
def test_wrong_usage_is_one_line_and_exit_2(runs: Path, capfd: Capture, argv: str, text: str) -> None:
    assert cli.main(argv.split()) == 2
    out, err = capfd.readouterr()
    assert out in ("", "loading ...\n")
    assert_one_line(err, text)
    assert not runs.exists()


def test_a_line_and_the_server_of_workers_come_before_what_takes_long_to_import() -> None:
    script = """
import sys
from freewheel.files import stdout
from freewheel.transport import forkserver
def prepare(*_):
    sys.exit(print("server", {"torch", "freewheel.run.trainer"} & {*sys.modules}))
stdout.loading = lambda: print("first", {"torch", "gymnasium"} & {*sys.modules})
forkserver.prepare = prepare
from freewheel.cli.main import main
main(["train", "CartPole-v1"])
"""
    assert python("-c", script).stdout == "first set()\nserver set()\n"


@pytest.mark.parametrize(
    ("placement", "argv", "text"), [(("inline", "processes")[number % 2], *one) for number, one in enumerate(SETUP)]
)
def test_wrong_setup_is_one_line_and_exit_1(runs: Path, capfd: Capture, argv: str, text: str, placement: str) -> None:
    assert cli.main(["train", *argv.split(), "--placement", placement]) == 1
    out, err = capfd.readouterr()
    assert re.fullmatch(MEASURING, out)
    assert_one_line(err, text)
    assert not runs.exists()


def test_a_missing_gpu_is_said(runs: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["train", "CartPole-v1", "--device", "cuda"]) == 1
    assert_one_line(capfd.readouterr().err, "--device cuda: torch sees no GPU here; use --device cpu")
    assert not runs.exists()


def test_a_place_that_cannot_be_written_is_refused(runs: Path, capfd: Capture) -> None:
    Path("file").write_text("not a directory")
    for folder in ("file", "file/runs"):
        assert cli.main(["train", "CartPole-v1", "--runs-dir", folder]) == 1
        assert_one_line(capfd.readouterr().err, f"cannot write runs under {folder}: ")
    assert Path("file").read_text() == "not a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place_is_refused(runs: Path, capfd: Capture) -> None:
    runs.mkdir(mode=0o500)
    assert cli.main(["train", "CartPole-v1"]) == 1
    told = capfd.readouterr().err
    assert_one_line(told, "cannot write runs under runs: runs is not a writable directory; choose another")


def test_an_existing_run_is_left_alone(runs: Path, capfd: Capture) -> None:
    (runs / "mine").mkdir(parents=True)
    (runs / "mine" / "notes").write_text("keep me")
    assert cli.main(["train", "CartPole-v1", "--run", "mine"]) == 1
    assert_one_line(capfd.readouterr().err, "run 'mine' exists in runs; choose another --run or remove it")
    assert [path.name for path in (runs / "mine").iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["train", "CartPole-v1", "--stepz", "3"], 2, "unknown option --stepz; did you mean '--steps'?"),
        (["eval", "nosuch"], 2, "no run 'nosuch' in runs; train one first"),
        pytest.param(["train", "needy_world:World", "--placement", "processes"], 1,
                     "cannot import 'needy_world': it imports 'no_such", marks=pytest.mark.system),
    ],
)  # fmt: skip
def test_the_real_command_says_the_same(runs: Path, argv: list[str], code: int, text: str) -> None:
    told = shell(*argv)
    assert told.returncode == code
    assert re.fullmatch(MEASURING, told.stdout)
    assert_one_line(told.stderr, text)
    assert not runs.exists()


def help_of(capfd: Capture, *argv: str) -> str:
    assert cli.main([*argv, "--help"]) == 0
    return " ".join(capfd.readouterr().out.replace("│", " ").split())


def test_help_lists_every_option_of_train_and_every_choice(capfd: Capture) -> None:
    text = help_of(capfd, "train")
    for prefix, options in {"": RunConfig, "ppo.": PPOConfig, "policy.": PolicyConfig}.items():
        for name in flags.option_types(options, flat=True):
            assert f" --{prefix}{name.replace('_', '-')} " in text
    for name in (*flags.option_types(LockstepConfig), *flags.option_types(GymOptions, flat=True)):
        assert f" --{name.replace('_', '-')} " in text
    assert "Seconds that a step may take" in text
    for name in (*ALGORITHMS, *MODES):
        assert f" {name}: " in text
    assert f"Named options to start from: {', '.join(presets())}." in text
    for family in FAMILIES.values():
        assert family.flags.env_help in text
        assert family.flags.help in text
    for word in ("--env.KEY", "--seeds", "--jobs", "--dry-run", "--print-config"):
        assert word in text


def test_help_is_for_the_environment_algorithm_and_mode_that_are_named(capfd: Capture) -> None:
    text = help_of(capfd, "train", "freewheel/RoughDrone-v0", "--algo", "mbpo", "--mode=continuous")
    for name in ("--mbpo.rollout-schedule", "--max-lag", "--clip-actions"):
        assert f" {name} " in text
    for name in ("--ppo.", "--placement", "--step-timeout"):
        assert name not in text.partition("Options of other modes")[0]


def test_help_names_the_options_of_other_modes_and_finds_any_by_a_word(capfd: Capture) -> None:
    others = help_of(capfd, "train").partition("Options of other modes, algorithms and environments:")[2]
    for name in ("--max-lag", "--sac.tau", "--overflow", "--clip-actions"):
        assert f" {name} " in others
    assert "--placement" not in others
    assert cli.main(["train", "--help", "max-lag"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("--max-lag")
    assert "--mode continuous" in out
    assert max(map(len, out.splitlines())) <= 80
    for word, found in {"publish-every": "--sac.publish-every", "seeds": "--seeds", "preset": "--preset"}.items():
        assert cli.main(["train", "--help", word]) == 0
        assert f"{found}" in capfd.readouterr().out
    assert "usage: freewheel train" in help_of(capfd, "train", "CartPole-v1")


@pytest.mark.parametrize(("word", "found"), [
    ("learning_rate", ["--mbpo.lr", "--ppo.lr", "--sac.lr"]), ("net-arch", ["--policy.hidden"]),
    ("batch_size", ["--mbpo.batch", "--ppo.minibatch", "--sac.batch", "--collection-batch-size"]),
])  # fmt: skip
def test_help_about_a_word_of_another_library(word: str, found: list[str], capfd: Capture) -> None:
    assert cli.main(["train", "--help", word]) == 0
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines() if line.startswith("--")] == found


@pytest.mark.parametrize(("word", "family"), [
    ("MyEnv", "gym"), ("straggler", "straggler"), ("CartPole-v1", "gym"), ("freewheel/RoughDrone-v0", "drone"),
])  # fmt: skip
def test_help_about_an_environment(word: str, family: str, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gymnasium.registry, "MyEnv", gymnasium.envs.registration.EnvSpec("MyEnv"))
    assert cli.main(["train", "--help", word]) == 0
    assert f"Shown are the options of ppo in mode lockstep on {family} environments" in capfd.readouterr().out


def test_every_option_can_be_found_and_is_described() -> None:
    known = {one.flag.lstrip("-").replace("-", "_"): one for one in find.all_options()}
    assert {*known} >= {*resolve._all_options()}
    assert [name for name, one in known.items() if not one.text] == []


def test_help_of_shares_and_of_commands(capfd: Capture) -> None:
    assert cli.main(["help", "shares"]) == 0
    text = capfd.readouterr().out
    for kind in (*WORKER_TIME, *LEARNER_TIME):
        assert f"\n  {kind} " in text
    assert cli.main(["help", "doctor"]) == 0
    assert capfd.readouterr().out.startswith("usage: freewheel doctor")


@pytest.mark.parametrize(("command", "options"), [("eval", EvalCommandOptions), ("play", PlayOptions)])
def test_help_lists_every_option_of_a_command(command: str, options: type[Any], capfd: Capture) -> None:
    text = help_of(capfd, command)
    for name in flags.option_types(options):
        assert f" --{name.replace('_', '-')} " in text
    protocols = [one for family in FAMILIES.values() for one in family.evaluation.protocols]
    assert all((f" --{one.name} " in text) == (command == "eval") for one in protocols)
    assert protocols


def test_help_and_options_do_without_torch(runs: Path) -> None:
    words = (["train", "CartPole-v1", "--print-config"], ["train", "--help"])
    code = f"from freewheel.cli.main import main; print([main(one) for one in {words}]);"
    code += "import sys; assert 'torch' not in sys.modules"
    assert python("-c", code).stdout.endswith("[0, 0]\n")


def test_the_overview_names_every_command_and_is_light(capfd: Capture) -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert cli.main(argv) == 0
        text = capfd.readouterr().out
        for command in cli.COMMANDS.values():
            assert f"\n  {command.name} " in text
            assert command.summary in text
    assert help_of(capfd, "doctor").startswith("usage: freewheel doctor ")
    heavy = "{'numpy', 'gymnasium', 'tyro', 'rich', 'torch'}"
    code = f"import sys; from freewheel.cli.main import main; main(['--help']); assert not {heavy} & {{*sys.modules}}"
    python("-c", code)


@pytest.mark.parametrize("flag", ["--env.some-key", "--env.some_key"])
def test_dashes_in_an_argument_of_the_environment_are_underscores(flag: str, runs: Path, capfd: Capture) -> None:
    assert cli.main(["train", "bad_worlds:World", flag, "7", "--steps", "64", "--run", "it", "--evals", "0"]) == 0
    assert json.loads((runs / "it" / "config.json").read_text())["env_args"] == {"some_key": 7}


def test_the_version_is_told(capfd: Capture) -> None:
    assert cli.main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("freewheel ")


def test_the_resolved_options_are_printed_and_can_be_used(runs: Path, capfd: Capture) -> None:
    assert cli.main(["train", "CartPole-v1", "--ppo.lr", "0.5", "--env.gravity", "9", "--print_config"]) == 0
    printed = capfd.readouterr().out
    assert json.loads(printed)["ppo"]["lr"] == 0.5
    Path("mine.json").write_text(printed)
    assert cli.main(["train", "--config", "mine.json", "--print-config"]) == 0
    assert {**json.loads(capfd.readouterr().out), "sources": None} == {**json.loads(printed), "sources": None}
    assert not runs.exists()


def test_a_dry_run_shows_the_plan_and_starts_nothing(runs: Path, capfd: Capture) -> None:
    assert cli.main(["train", "bad_worlds:World", "--dry_run", "--steps", "1e6"]) == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[0] == "world    bad_worlds:World: 2 observation columns (obs), 2 actions to choose from"
    assert "budget   1,000,000 steps" in out.splitlines()
    assert err == ""
    assert not runs.exists()


def test_the_example_of_the_front_page_runs(runs: Path, capfd: Capture) -> None:
    """The flags of the README, fewer steps."""
    argv = ["--algo", "ppo", "--mode", "lockstep", "--num_envs", "8", "--steps", "512", "--seed", "1", "--run", "first"]
    assert cli.main(["train", "CartPole-v1", *argv, "--eval-episodes", "2"]) == 0
    assert json.loads((runs / "first" / "summary.json").read_text())["env_steps"] == 512
    assert "all steps taken" in capfd.readouterr().out
    assert cli.main(["eval", "first", "--episodes", "2"]) == 0
    assert capfd.readouterr().out.startswith("CartPole-v1: mean ")


@pytest.mark.parametrize("argv", ["--help", "train CartPole-v1 --print-config"])
def test_a_reader_who_leaves_is_no_error(runs: Path, argv: str) -> None:
    command = f"{sys.executable} -m freewheel {argv} | true; echo ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    told = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=55, check=False)
    assert (told.stdout, told.stderr) == ("0\n", "")
