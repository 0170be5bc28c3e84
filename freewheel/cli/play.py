"""The command `freewheel play`."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from freewheel.cli.eval import RunOptions, open_policy, parse
from freewheel.errors import EnvError, SetupError, UsageError
from freewheel.registry import Command

if TYPE_CHECKING:
    from freewheel.core import NDArray
    from freewheel.run.saved import SavedRun

RENDER_MODES = {"human": "human", "ansi": "ansi", "gif": "rgb_array", "mp4": "rgb_array"}
#: The module that writes a file of this kind, and how to get it.
WRITERS = {
    "gif": ("PIL", "animated pictures need Pillow: pip install pillow"),
    "mp4": ("imageio_ffmpeg", "films need ffmpeg: pip install imageio-ffmpeg"),
}
#: What failures to draw mean, by what the environment says, and what to do.
REMEDIES = {
    r"pygame": "it draws with pygame: pip install 'gymnasium[classic-control]'",
    r"mujoco.*not installed|No module named 'mujoco'": "it needs MuJoCo: pip install 'gymnasium[mujoco]'",
    r"box2d|Box2D": "it needs Box2D: pip install 'gymnasium[box2d]'",
    r"(?i)opengl|egl|osmesa|glfw|glcontext|gladloadgl": (
        "MuJoCo finds no OpenGL here: set MUJOCO_GL=egl (with a GPU) or MUJOCO_GL=osmesa (apt install libosmesa6)"
    ),
}
FRAMES_PER_S = 30


@dataclass(frozen=True)
class PlayOptions(RunOptions):
    """Watch the greedy policy of a run."""

    render: Literal["auto", "human", "ansi", "gif", "mp4", "none"] = "auto"
    """How to show episodes: in a window, as text, as an animated picture or a film in a file, or not at all."""
    out: str = ""
    """The file to write, NAME.gif or NAME.mp4 (default: play/episode-1.gif in the run directory). Several episodes are
    NAME-1.gif, NAME-2.gif, ..."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out and Path(self.out).suffix[1:] not in WRITERS:
            raise UsageError(f"--out {self.out}: write a .gif or an .mp4")
        if self.out and self.render not in ("auto", Path(self.out).suffix[1:]):
            raise UsageError(f"--render {self.render} does not write {self.out}; leave out one of them")

    @property
    def shown(self) -> str:
        """--render, or what the name of the file says."""
        return Path(self.out).suffix[1:] if self.out else self.render

    def file(self, folder: Path, episode: int, kind: str) -> Path:
        """Where the pictures of an episode go."""
        if not self.out:
            return folder / "play" / f"episode-{episode + 1}.{kind}"
        path = Path(self.out)
        return path.with_stem(f"{path.stem}-{episode + 1}") if (self.episodes or 1) > 1 else path


def _run(argv: Sequence[str]) -> int:
    from rich.console import Console

    from freewheel.seeding import scoring_seed

    options, console = parse(PlayOptions, argv, "play"), Console(highlight=False)
    run, actor = open_policy(options, console)
    render = _render_mode(options.shown, run)
    kind = options.shown if options.shown in WRITERS else "gif"
    if render == "rgb_array":
        _require_writer(kind)
    seed = scoring_seed(run.config.run.evaluation.eval_seed) if options.seed is None else options.seed
    for episode in range(options.episodes or 1):
        frames: list[NDArray] = []

        def show(picture: NDArray | str | None, frames: list[NDArray] = frames) -> None:
            if isinstance(picture, str):
                console.print(picture, markup=False, soft_wrap=True)
            elif picture is not None:
                frames.append(picture)

        try:
            rewards = run.play(actor, (seed, episode), render, show)
        except (SetupError, EnvError) as error:
            raise _explained(error, render) from None
        console.print(f"episode {episode + 1}: return {sum(rewards):.1f} in {len(rewards)} steps")
        if frames:
            path = options.file(run.path, episode, kind)
            _write(frames, path, kind)
            console.print(f"  {path}", markup=False, soft_wrap=True)
    return 0


def _render_mode(wanted: str, run: SavedRun) -> str | None:
    """The render_mode of the environment for --render."""
    if wanted == "none":
        return None
    screen = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if not screen:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else pygame fails before it draws into memory
        os.environ.setdefault("MUJOCO_GL", "egl")  # else MuJoCo looks for a screen
    offered = run.config.env.render_modes()
    if wanted == "auto":
        preferred = ["human", "ansi", "rgb_array"] if screen else ["ansi", "rgb_array"]
        return next((mode for mode in preferred if mode in offered), None)
    if RENDER_MODES[wanted] not in offered:
        raise SetupError(f"{run.config.env.id} cannot render {wanted}; it offers {', '.join(offered) or 'nothing'}")
    return RENDER_MODES[wanted]


def _require_writer(kind: str) -> None:
    """Before anything is played."""
    module, remedy = WRITERS[kind]
    if importlib.util.find_spec(module) is None:
        raise SetupError(f"{remedy}, or use --render none")


def _explained(error: SetupError | EnvError, render: str | None) -> SetupError | EnvError:
    """The same error, or one line that says what to install where pictures could not be drawn."""
    text = str(error)
    found = next((remedy for pattern, remedy in REMEDIES.items() if render and re.search(pattern, text)), None)
    return error if found is None else SetupError(f"cannot show it: {found}, or use --render none")


def _write(frames: Sequence[NDArray], path: Path, kind: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        (_animation if kind == "gif" else _film)([frame.astype("uint8") for frame in frames], path)
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror or error}; choose another --out") from None


def _animation(frames: Sequence[NDArray], path: Path) -> None:
    from PIL import Image

    first, *rest = (Image.fromarray(frame) for frame in frames)
    first.save(path, save_all=True, append_images=rest, duration=1000 // FRAMES_PER_S, loop=0)


def _film(frames: Sequence[NDArray], path: Path) -> None:
    import imageio_ffmpeg

    height, width = (size // 2 * 2 for size in frames[0].shape[:2])  # the codec wants even sizes
    film = imageio_ffmpeg.write_frames(str(path), (width, height), fps=FRAMES_PER_S, macro_block_size=1)
    film.send(None)
    for frame in frames:
        film.send(frame[:height, :width].copy(order="C"))
    film.close()


COMMAND = Command(
    name="play", argument="RUN", summary="watch it play", options=lambda _: PlayOptions, run=_run, order=2
)
