"""The command `freewheel play`."""

from __future__ import annotations

import importlib.util
import io
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from freewheel.cli.eval import RunOptions, open_policy, parse
from freewheel.errors import EnvError, Range, SetupError, UsageError
from freewheel.files import disk
from freewheel.files.reach import check_folder, typed
from freewheel.registry import Command

if TYPE_CHECKING:
    from freewheel.core import NDArray

RENDER_MODES = {"human": "human", "ansi": "ansi", "gif": "rgb_array", "mp4": "rgb_array", "png": "rgb_array"}
#: The module that a file of this kind needs, and how to get it.
MODULES = {
    "gif": ("PIL", "animated pictures need Pillow: pip install pillow"),
    "mp4": ("imageio_ffmpeg", "films need ffmpeg: pip install imageio-ffmpeg"),
}
#: The cause and remedy of failures to draw, by a pattern of the environment's error.
REMEDIES = {
    r"pygame": "it draws with pygame: pip install 'gymnasium[classic-control]'",
    r"mujoco.*not installed|No module named 'mujoco'": "it needs MuJoCo: pip install 'gymnasium[mujoco]'",
    r"box2d|Box2D": "it needs Box2D: pip install 'gymnasium[box2d]'",
    r"(?i)opengl|egl|osmesa|glfw|glcontext|gladloadgl": (
        "MuJoCo finds no OpenGL here: set MUJOCO_GL=egl (with a GPU) or MUJOCO_GL=osmesa (apt install libosmesa6)"
    ),
}
USUAL_FPS = 30.0  # if the environment declares no render_fps and no time of a step
GIF_FPS = 50.0  # the most pictures per second that viewers of animated pictures show


@dataclass(frozen=True)
class PlayOptions(RunOptions):
    """Watch the greedy policy of a run."""

    render: Literal["auto", "human", "ansi", "gif", "mp4", "png", "none"] = "auto"
    """How to show episodes: in a window, as text, in a file as an animated picture, a film or the last picture (which
    shows the whole flight of the drone), or not at all."""
    video: bool = False
    """Write a film of each episode, NAME.mp4: the same as --render mp4."""
    fps: Annotated[float | None, Range(above=0, most=1000)] = None
    """Pictures per second of a film or an animated picture, one per step (default: real time, from the environment's
    render_fps or the time of its step; else 30)."""
    out: str = ""
    """The file to write, NAME.gif, NAME.mp4 or NAME.png (default: play/episode-1.gif in the run directory). Several episodes
    go to NAME-1.gif, NAME-2.gif, ..."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out and Path(self.out).suffix[1:] not in RECORDERS:
            raise UsageError(f"--out {self.out}: write a .gif, an .mp4 or a .png")
        if self.video and self.render not in ("auto", "mp4"):
            raise UsageError(f"--video writes an mp4, --render {self.render} does not; leave out one of them")
        wanted = "mp4" if self.video else self.render
        if self.out and wanted not in ("auto", Path(self.out).suffix[1:]):
            given = "--video" if self.video else f"--render {self.render}"
            raise UsageError(f"{given} does not write {self.out}; leave out one of them")

    @property
    def shown(self) -> str:
        """The way to show episodes: by the name of the file, else --video, else --render."""
        return Path(self.out).suffix[1:] if self.out else "mp4" if self.video else self.render

    def file(self, folder: Path, episode: int, kind: str) -> Path:
        """Return the path of the file for an episode's pictures."""
        if not self.out:
            return folder / "play" / f"episode-{episode + 1}.{kind}"
        path = typed(Path(self.out).parent) / Path(self.out).name
        return path.with_stem(f"{path.stem}-{episode + 1}") if (self.episodes or 1) > 1 else path


def _run(argv: Sequence[str]) -> int:
    from rich.text import Text

    from freewheel.config import synonyms
    from freewheel.envs.family import Rendering
    from freewheel.files.terminal import Terminal
    from freewheel.seeding import scoring_seed

    options, console = parse(PlayOptions, argv, "play", synonyms.PLAY), Terminal()
    run, actor = open_policy(options, console)
    _prepare_drawing()
    offered = run.config.env.rendering() if options.shown != "none" else Rendering()
    render = _render_mode(options.shown, run.config.env.id, offered.modes)
    fps = options.fps or offered.fps or USUAL_FPS
    kind = options.shown if options.shown in RECORDERS else "gif"
    if render == "rgb_array":
        _require_module(kind)
    seed = scoring_seed(run.config.run.evaluation.eval_seed) if options.seed is None else options.seed
    for episode in range(options.episodes or 1):
        file = File(options.file(run.path, episode, kind), kind, fps)

        def show(picture: NDArray | str | None, file: File = file) -> None:
            if isinstance(picture, str):
                console.print(Text.from_ansi(picture), soft_wrap=True)
            elif picture is not None:
                file.add(picture)

        try:
            rewards = run.play(actor, (seed, episode), render, show)
        except (SetupError, EnvError) as error:
            raise _explained(error, render) from None
        finally:
            file.close()
        console.print(f"episode {episode + 1}: return {sum(rewards):.1f} in {len(rewards)} steps")
        if file.begun:
            console.print(f"  {file.path}", soft_wrap=True)
    return 0


def _screen() -> bool:
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _prepare_drawing() -> None:
    """Let libraries draw into memory where there is no screen."""
    if not _screen():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else pygame fails before it draws into memory
        os.environ.setdefault("MUJOCO_GL", "egl")  # else MuJoCo looks for a screen


def _render_mode(wanted: str, env: str, offered: Sequence[str]) -> str | None:
    """Return the environment's render_mode for --render; SetupError if the environment does not offer it."""
    if wanted == "none":
        return None
    if wanted == "auto":  # the first mode that the environment names and that can be shown here
        shown = ["human", "ansi", "rgb_array"] if _screen() else ["ansi", "rgb_array"]
        return next((mode for mode in offered if mode in shown), None)
    if RENDER_MODES[wanted] in offered:
        return RENDER_MODES[wanted]
    if possible := [one for one, mode in RENDER_MODES.items() if mode in offered]:
        raise SetupError(f"{env} cannot be shown as {wanted}; say --render {' or '.join(possible)}")
    remedy = 'give it a render() that returns a picture [H, W, 3], and metadata = {"render_modes": ["rgb_array"]}'
    raise SetupError(f"{env} draws nothing; {remedy}")


def _require_module(kind: str) -> None:
    """Raise SetupError if the module for such a file is missing, before anything is played."""
    module, remedy = MODULES.get(kind, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise SetupError(f"{remedy}, or use --render png, which needs nothing")


def _explained(error: SetupError | EnvError, render: str | None) -> SetupError | EnvError:
    """Return the same error, or one that says what to install or set if pictures could not be drawn."""
    text = str(error)
    found = next((remedy for pattern, remedy in REMEDIES.items() if render and re.search(pattern, text)), None)
    return error if found is None else SetupError(f"cannot show it: {found}, or use --render none")


class FilmRecorder(Protocol):
    """Makes a file of the pictures [H, W, 3] of an episode, which are added in order; `close` returns its bytes."""

    def __init__(self, fps: float) -> None: ...
    def add(self, picture: NDArray) -> None: ...
    def close(self) -> bytes: ...


class Animation:
    """A gif, which `close` makes of all pictures. If there are more per second than viewers show, only every second,
    third, ... picture is kept."""

    def __init__(self, fps: float) -> None:
        self._pictures = list[Any]()
        self._every = math.ceil(fps / GIF_FPS)
        self._milliseconds = round(1000 * self._every / fps)

    def add(self, picture: NDArray) -> None:
        from PIL import Image

        self._pictures.append(Image.fromarray(picture).quantize())

    def close(self) -> bytes:
        if not self._pictures:
            return b""
        first, *rest = self._pictures[:: self._every]
        made, about = io.BytesIO(), {"duration": self._milliseconds, "loop": 0}
        first.save(made, "gif", save_all=True, append_images=rest, **about)
        return made.getvalue()


class Film:
    """An mp4, which a separate program (ffmpeg) writes picture by picture in a temporary folder."""

    def __init__(self, fps: float) -> None:
        self._folder, self._fps = TemporaryDirectory(), fps
        self._path = Path(self._folder.name, "film.mp4")
        self._film: Any = None

    def add(self, picture: NDArray) -> None:
        height, width = (size // 2 * 2 for size in picture.shape[:2])  # the codec requires even sizes
        if self._film is None:
            import imageio_ffmpeg

            self._film = imageio_ffmpeg.write_frames(
                str(self._path), (width, height), fps=self._fps, macro_block_size=1
            )
            self._film.send(None)
        self._film.send(picture[:height, :width].copy(order="C"))

    def close(self) -> bytes:
        with self._folder:
            if self._film is None:
                return b""
            self._film.close()
            return self._path.read_bytes()


class LastPicture:
    """A png of the last picture."""

    def __init__(self, fps: float) -> None:
        self._picture: NDArray | None = None

    def add(self, picture: NDArray) -> None:
        self._picture = picture

    def close(self) -> bytes:
        from freewheel.cli import png

        return b"" if self._picture is None else png.encode(self._picture)


RECORDERS: Mapping[str, type[FilmRecorder]] = {"gif": Animation, "mp4": Film, "png": LastPicture}


class File:
    """The file for an episode's pictures, written when all are there. If it cannot be written, SetupError is raised."""

    def __init__(self, path: Path, kind: str, fps: float) -> None:
        self.path, self._kind, self._fps = path, kind, fps
        self._recorder: FilmRecorder | None = None

    @property
    def begun(self) -> bool:
        return self._recorder is not None

    def add(self, picture: NDArray) -> None:
        with self._explaining():
            if self._recorder is None:
                from freewheel.run.checkpoints.checkpoint import make_private

                make_private(self.path.parent)
                check_folder(self.path.parent)
                self._recorder = RECORDERS[self._kind](self._fps)
            self._recorder.add(picture.astype("uint8"))

    def close(self) -> None:
        with self._explaining():
            if self._recorder is not None and (data := self._recorder.close()):
                disk.replace(self.path, data)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SetupError(f"cannot write {self.path}: {error.strerror or error}; choose another --out") from None


COMMAND = Command(
    name="play", argument="RUN", summary="watch it play", options=lambda _: PlayOptions, run=_run, order=2
)
