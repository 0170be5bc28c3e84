"""What the commands other than train say to a person: scores, episodes, the machine's health."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from freewheel.cli import doctor
from freewheel.config import flags
from freewheel.config.resolve import Config
from freewheel.core import Actor, NDArray
from freewheel.errors import SetupError, UsageError
from freewheel.run.saved import SavedRun, open_run
from freewheel.worlds.cage2 import cyborg, official, yardsticks
from freewheel.worlds.cage2.scenario import STEPS

T = TypeVar("T", bound="RunOptions")
YARD = 500  # games of a simple defender


@dataclass(frozen=True)
class RunOptions:
    """Which run."""

    run: str = ""
    """The run: a name under --runs-dir or a path. Also the first or last word."""
    runs_dir: str = "runs"
    """Where runs are kept."""
    which: str = "best"
    """Which weights: best, latest, or the number of a step."""
    episodes: int = 1
    """Episodes to play."""
    seed: int | None = None
    """Seed of the episodes (default: those the run was evaluated on)."""

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise UsageError(f"--episodes must be positive, not {self.episodes}")


@dataclass(frozen=True)
class EvalOptions(RunOptions):
    """Score a run."""

    episodes: int = 20
    """Episodes to play."""


@dataclass(frozen=True)
class OfficialOptions(RunOptions):
    """Score a run as CAGE Challenge 2 does."""

    episodes: int = 100
    """Episodes of each length against each red agent."""
    seed: int | None = official.SEED
    """Where the one stream of random numbers begins."""


@dataclass(frozen=True)
class PlayOptions(RunOptions):
    """Watch a run."""

    render: Literal["auto", "human", "ansi", "gif", "none"] = "auto"
    """How to show it: a window, text, an animated picture in the run directory, or not at all."""


def parse(options: type[T], argv: list[str], prog: str, description: str) -> T:
    """The command's options, RUN first."""
    if "--help" in argv or "-h" in argv:
        flags.show_help(options, prog, description)
    positional, given = flags.read_argv(argv, flags.option_types(options))
    if len(positional) > 1:
        raise UsageError(f"one run at a time, not {' '.join(positional)}")
    if positional:
        given["run"] = (positional[0],)
    if not given.get("run", ("",))[0]:
        raise UsageError(f"which run? {prog.replace('RUN', 'NAME')}, a directory under runs/")
    return flags.build(options, given)


def report_score(options: EvalOptions) -> int:
    """Greedy episodes as one line."""
    run, console = open_run(options.run, options.runs_dir), Console(highlight=False)
    score = run.score(_actor(run, options, console), options.episodes, options.seed)
    console.print(
        f"{run.config.env.id}: mean {score.mean:.1f} ± {score.spread:.1f} over {options.episodes} greedy episodes "
        f"(min {min(score.returns):.1f}, max {max(score.returns):.1f}, length {np.mean(score.lengths):.0f})",
        soft_wrap=True,
        markup=False,
    )
    if run.config.env.id == cyborg.FAST:
        console.print(_beside_others(run.config, score.mean))
    return 0


def _beside_others(config: Config, mean: float) -> Table:
    """A defender's score among those of simple ones, played now, and of published ones."""
    red, steps = str(config.env.args["red_agent"]), config.world.max_episode_steps or STEPS
    scores = [(mean, official.THIS)]
    for name, who in yardsticks.SIMPLE.items():
        scores.append((float(yardsticks.returns(name, red, steps, YARD).mean()), f"{who}, measured now"))
    if red in official.RIVALS and steps in official.LENGTHS:
        column = official.RIVALS.index(red) * len(official.LENGTHS) + official.LENGTHS.index(steps)
        scores += [(row[column], f"{who}, published ({code})") for (who, code), row in official.PUBLISHED.items()]
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    table.add_column(justify="right")
    for score, who in sorted(scores, reverse=True):
        table.add_row(f"{score:.1f}", Text(who), style="bold" if who == official.THIS else "")
    return table


def report_official(options: OfficialOptions) -> int:
    """The challenge's own evaluation, as a table and in official.json."""
    run, console = open_run(options.run, options.runs_dir), Console(highlight=False)

    def tell(cell: official.Cell) -> None:
        text = f"{cell.red_agent:16} {cell.steps:3} steps: mean {cell.mean:8.2f}, standard deviation {cell.spread:7.2f}"
        console.print(text, markup=False, soft_wrap=True)

    seed = official.SEED if options.seed is None else options.seed
    board = official.examine(run.config, _actor(run, options, console), options.episodes, seed, tell)
    told = {"run": run.path.name, "which": options.which, **board.to_json()}
    (run.path / "official.json").write_text(json.dumps(told, indent=2) + "\n")
    console.print(_leader_board(board))
    console.print(f"  {run.path / 'official.json'}", markup=False, soft_wrap=True)
    return 0


def _leader_board(board: official.Board) -> Table:
    """This run among the published scores."""
    table = Table(box=None, padding=(0, 1, 0, 0), caption=f"published: 1000 episodes each; * on {official.OLDER}")
    table.add_column("steps", no_wrap=True)
    for red in official.RIVALS:
        for steps in official.LENGTHS:
            table.add_column(f"{red.removeprefix('Red').removesuffix('Agent')}\n{steps}", justify="right", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    for who, scores in official.comparison(board):
        table.add_row(Text(who), *(f"{score:.1f}" for score in scores), style="bold" if who == official.THIS else "")
    return table


def show_episodes(options: PlayOptions) -> int:
    """Greedy episodes, shown one after another."""
    run, console = open_run(options.run, options.runs_dir), Console(highlight=False)
    actor = _actor(run, options, console)
    render = _render_mode(options.render, run)
    seed = run.config.run.eval_seed if options.seed is None else options.seed
    for episode in range(options.episodes):
        frames: list[NDArray] = []

        def show(picture: NDArray | str | None, frames: list[NDArray] = frames) -> None:
            if isinstance(picture, str):
                console.print(picture, markup=False, soft_wrap=True)
            elif picture is not None:
                frames.append(picture)

        rewards = run.play(actor, (seed, episode), render, show)
        console.print(f"episode {episode + 1}: return {sum(rewards):.1f} in {len(rewards)} steps")
        if frames:
            picture = _animation(frames, run.path / "play" / f"episode-{episode + 1}.gif")
            console.print(f"  {picture}", markup=False, soft_wrap=True)
    return 0


def report_health() -> int:
    """A table; exit code 1 if something that is needed is missing."""
    table = Table(show_header=False, box=None)
    healthy = True
    for well, what, how in doctor.examine():
        healthy &= well
        table.add_row(Text("ok", "green") if well else Text("!!", "red"), Text(what), Text(how))
    Console(highlight=False).print(table)
    return 0 if healthy else 1


def _actor(run: SavedRun, options: RunOptions, console: Console) -> Actor:
    """The policy asked for; what had to be passed over to find one is said aloud."""
    actor, warnings = run.actor(options.which)
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    return actor


def _render_mode(wanted: str, run: SavedRun) -> str | None:
    """The env's render_mode for what the person asked for."""
    if wanted == "none":
        return None
    screen = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if not screen:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # or pygame complains before it draws into memory
    offered = run.config.env.render_modes()
    modes = {"human": "human", "ansi": "ansi", "gif": "rgb_array"}
    if wanted == "auto":
        preferred = ["human", "ansi", "rgb_array"] if screen else ["ansi", "rgb_array"]
        return next((mode for mode in preferred if mode in offered), None)
    if modes[wanted] not in offered:
        raise SetupError(f"{run.config.env.id} cannot render {wanted}; it offers {', '.join(offered) or 'nothing'}")
    return modes[wanted]


def _animation(frames: list[NDArray], path: Path) -> Path:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise SetupError("animated pictures need Pillow: pip install pillow, or use --render none") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *rest = (Image.fromarray(np.asarray(frame, np.uint8)) for frame in frames)
    first.save(path, save_all=True, append_images=rest, duration=33, loop=0)
    return path
