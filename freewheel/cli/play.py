"""The command `freewheel play`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from freewheel.cli.eval import RunOptions, open_policy, parse
from freewheel.errors import SetupError
from freewheel.registry import Command

if TYPE_CHECKING:
    from freewheel.core import NDArray
    from freewheel.run.saved import SavedRun

RENDER_MODES = {"human": "human", "ansi": "ansi", "gif": "rgb_array"}


@dataclass(frozen=True)
class PlayOptions(RunOptions):
    """Watch the greedy policy of a run."""

    render: Literal["auto", "human", "ansi", "gif", "none"] = "auto"
    """How to show episodes: in a window, as text, as an animated picture in the run directory, or not at all."""


def _run(argv: Sequence[str]) -> int:
    from rich.console import Console

    from freewheel.seeding import scoring_seed

    options, console = parse(PlayOptions, argv, "play"), Console(highlight=False)
    run, actor = open_policy(options, console)
    render = _render_mode(options.render, run)
    seed = scoring_seed(run.config.run.evaluation.eval_seed) if options.seed is None else options.seed
    for episode in range(options.episodes or 1):
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


def _render_mode(wanted: str, run: SavedRun) -> str | None:
    """The render_mode of the environment for --render."""
    if wanted == "none":
        return None
    screen = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if not screen:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else pygame fails before it draws into memory
    offered = run.config.env.render_modes()
    if wanted == "auto":
        preferred = ["human", "ansi", "rgb_array"] if screen else ["ansi", "rgb_array"]
        return next((mode for mode in preferred if mode in offered), None)
    if RENDER_MODES[wanted] not in offered:
        raise SetupError(f"{run.config.env.label} cannot render {wanted}; it offers {', '.join(offered) or 'nothing'}")
    return RENDER_MODES[wanted]


def _animation(frames: list[NDArray], path: Path) -> Path:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise SetupError("animated pictures need Pillow: pip install pillow, or use --render none") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *rest = (Image.fromarray(frame.astype("uint8")) for frame in frames)
    first.save(path, save_all=True, append_images=rest, duration=33, loop=0)
    return path


COMMAND = Command(
    name="play", argument="RUN", summary="watch it play", options=lambda _: PlayOptions, run=_run, order=2
)
