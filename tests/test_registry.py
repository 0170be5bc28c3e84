"""Registries: our entries are found where they live, those of other packages by their entry points."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from freewheel.cli.main import COMMANDS
from freewheel.collect.mode import MODES
from freewheel.core import Collector, Env, Learner, RowCounts, Snapshot
from freewheel.envs.family import WORLDS
from freewheel.envs.gym import GymConfig
from freewheel.errors import SetupError, UsageError
from freewheel.registry import Named, Registry, changed, moved, own_module, with_defaults
from tests.support.places import ROOT
from tests.support.runs import python

PLUGIN = """
from dataclasses import dataclass

import gymnasium

from freewheel.envs import gym
from freewheel.envs.family import FamilyFlags, WorldFamily
from freewheel.registry import Command


class Maze(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, depth=1):
        self.depth = depth

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 1, 1.0, True, False, {}


FAMILY = WorldFamily(
    name="mazes",
    serves=lambda name: name.startswith("maze:"),
    options=gym.GymOptions,
    build=lambda name, args, options, device: gym.build("plugin_of_mazes:Maze", args, options, device),
    flags=FamilyFlags(defaults={"num_envs": 3}, aliases={"depth": "env.depth"}, env_help="maze:NAME"),
)


@dataclass
class Options:
    "Dig."


COMMAND = Command(name="dig", argument="", summary="dig a maze", options=lambda argv: Options, run=lambda argv: 7)
BROKEN = None
"""


def install(folder: Path, *points: str) -> None:
    """A distribution called plugin-of-mazes, as pip would leave it."""
    (folder / "plugin_of_mazes.py").write_text(PLUGIN)
    about = folder / "plugin_of_mazes-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-mazes\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("\n".join(points))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("plugin_of_mazes", None)


def test_our_entries_are_found_by_their_files() -> None:
    assert {*MODES} == {"sequential", "lockstep", "batch", "continuous", "episodes", "ray"}
    assert {*WORLDS} == {"gym", "batched", "isaaclab", "drone", "straggler", "cage2"}
    assert {*COMMANDS} == {
        "train", "check", "eval", "play", "doctor", "export", "replay", "resume", "workflow", "runs", "plot", "timeline",
        "compare", "tune", "watch",
    }  # fmt: skip
    assert "batch" in MODES
    assert MODES["batch"].name == "batch"


def test_an_unknown_name_is_refused_with_similar_ones() -> None:
    with pytest.raises(UsageError, match=r"^unknown mode 'batsh'; did you mean 'batch'\?$"):
        MODES["batsh"]
    known = ", ".join(sorted(COMMANDS))
    with pytest.raises(UsageError, match=rf"^unknown command 'zzz'; choose from {known}$"):
        COMMANDS["zzz"]


@pytest.mark.system
def test_another_package_adds_a_world_and_a_command(tmp_path: Path) -> None:
    """In a process of its own, because registries are read once."""
    world, command = "mazes = plugin_of_mazes:FAMILY", "dig = plugin_of_mazes:COMMAND"
    install(tmp_path, "[freewheel.worlds]", world, "[freewheel.commands]", command)
    code = """
from freewheel.cli.main import main
assert main(["train", "maze:one", "--depth", "2", "--dry-run"]) == 0
assert main(["--help"]) == 0
assert main(["train", "--help"]) == 0
assert main(["dig"]) == 7
"""
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}", COLUMNS="200")
    assert done.stderr == ""
    assert "collect  lockstep: 3 envs" in done.stdout
    assert "  dig " in done.stdout
    assert "maze:NAME" in done.stdout


@pytest.mark.parametrize(
    ("point", "text"),
    [
        ("gym = freewheel.envs.gym:FAMILY", "two worlds have the name 'gym': uninstall one of the packages"),
        ("lost = plugin_of_mazes:NOTHING", "the world 'lost' of another package cannot be loaded"),
        ("gone = no_such_module:FAMILY", "the world 'gone' of another package cannot be loaded"),
    ],
)
def test_a_bad_entry_point_is_one_line(path: Path, point: str, text: str) -> None:
    install(path, "[freewheel.worlds]", point)
    registry: Registry[Named] = Registry("world", "FAMILY", "freewheel.envs")
    with pytest.raises(SetupError) as caught:
        registry.entries  # noqa: B018
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


#: Runs commands as if no package of this project were installed beside the core.
ALONE = """
import sys
from importlib import metadata

from freewheel.cli.main import main

def missing(name):
    raise metadata.PackageNotFoundError(name)

metadata.entry_points, metadata.distribution = lambda group: [], missing
for words in sys.argv[1:]:
    main(words.split())
from freewheel.envs.gym import GymConfig

try:
    GymConfig("freewheel/RoughDrone-v0").open(0)
except Exception as error:
    sys.stderr.write(f"freewheel: {error}")
"""
REFUSED = {
    "compare CartPole-v1": "the command 'compare' is in a package of its own: pip install freewheel-lab",
    "train CartPole-v1 --mode ray": "the mode 'ray' is in a package of its own: pip install freewheel-ray",
    "train CartPole-v1 --seeds 1..3": "--seeds is in a package of its own: pip install freewheel-lab",
    "train CartPole-v1 --preset cage2": "the preset 'cage2' is in a package of its own: pip install freewheel-cage2",
}
UNKNOWN = "unknown environment 'freewheel/RoughDrone-v0': it is in a package of its own, pip install freewheel-drone"


def test_the_core_alone_says_what_to_install() -> None:
    refused = python("-c", ALONE, *REFUSED).stderr.splitlines()
    assert refused == [f"freewheel: {said}" for said in (*REFUSED.values(), UNKNOWN)]


def test_modules_that_have_moved_are_found_by_their_former_names(path: Path) -> None:
    install(path, "[freewheel.moved_modules]", "old.mazes = plugin_of_mazes")
    assert moved("old.mazes") == "plugin_of_mazes"
    assert moved("old.mazes.deep") == "plugin_of_mazes.deep"
    assert moved("old.mazesque") == "old.mazesque"
    assert GymConfig("old.mazes:Maze").label == "old.mazes:Maze"
    assert own_module("old.mazes").__name__ == "plugin_of_mazes"


class Plain:
    """A learner of another package, which derives from nothing."""

    ready, hungry, buffer_util = True, False, 0.5

    def __init__(self) -> None:
        self.version, self.learning_rate = 0, 0.1
        self.observe = self.load_state_dict = lambda _: None

    def update(self) -> dict[str, float]:
        self.version += 1
        return {}

    def snapshot(self) -> Snapshot:
        return Snapshot(self.version, {})

    def rows(self) -> RowCounts:
        return RowCounts(trained=self.version)

    def state_dict(self) -> dict[str, float]:
        return {}


def test_an_object_that_derives_from_nothing_has_the_defaults_of_the_base() -> None:
    plain: Any = Plain()
    learner: Learner = with_defaults(plain, Learner)
    assert isinstance(learner, Learner)
    assert type(learner).__name__ == "Plain"
    learner.update()
    assert (learner.version, learner.rows().trained, learner.snapshot().version) == (1, 1, 1)
    assert learner.update == plain.update, "a call costs nothing more"
    assert (learner.ready, learner.hungry, learner.buffer_util) == (True, False, 0.5)
    assert (learner.fallback, learner.not_finite, learner.burst) == ("", None, 0)
    assert (learner.buffers(), learner.learned()) == ({}, None)
    learner.learning_rate = 0.01
    assert plain.learning_rate == 0.01


def test_an_object_that_derives_from_the_base_is_used_as_it_is() -> None:
    learner = with_defaults(with_defaults(cast(Any, Plain()), Learner), Learner)
    assert with_defaults(learner, Learner) is learner


def test_an_object_that_lacks_a_method_is_refused_with_its_name() -> None:
    class Incomplete(Plain):
        rows: Any = property(lambda self: self.missing)  # it raises AttributeError

    with pytest.raises(TypeError, match=r"Can't instantiate abstract class Incomplete .*'?rows'?"):
        with_defaults(cast(Any, Incomplete()), Learner)


def test_a_plain_collector_is_entered_and_left() -> None:
    class Mode:
        calls: ClassVar[list[str]] = []
        publish = collect = oldest = rows = stats = messages = summary = state_dict = load_state_dict = print

        def __enter__(self) -> None:
            self.calls.append("enter")

        def __exit__(self, *_: object) -> None:
            self.calls.append("exit")

    with with_defaults(cast(Any, Mode()), Collector) as collector:
        assert Mode.calls == ["enter"]
        answers = (collector.main_thread, collector.workers(), collector.eval_episodes(), collector.plant())
        assert answers == (False, (), None, None)
    assert Mode.calls == ["enter", "exit"]


def test_methods_of_an_env_are_replaced_and_the_others_are_its_own() -> None:
    class World:
        spec, set_context, reset, render, close = "spec", print, print, print, print

        def step(self, action: object) -> object:
            return "step", action

        def autoreset(self) -> str:
            return "own"

    world: Any = World()
    env: Any = changed(world, Env, step=lambda action: ("wrapped", *world.step(action)))
    assert (env.step(3), env.autoreset(), env.spec) == (("wrapped", "step", 3), "own", "spec")
    assert env.replay([], [], print) is None, "the default: it cannot bring episodes back"
    assert math.isnan(Learner.learning_rate)
