"""Runs that would never end by themselves: user's code that hangs or leaves, in a hook, an environment or a module."""

from __future__ import annotations

import random
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks._trainers import RUN, Trainer, wait_until

if TYPE_CHECKING:
    from benchmarks._faults import Setup

MINUTES, LATE = (
    0.1,
    50.0,
)  # the limit of a run, and seconds after it: its start and the 30 s of a last hook are among them

WORLD = """
    import atexit, os, threading, time
    import gymnasium

    def for_ever(*_):
        while True:
            time.sleep(1.0)

    class World(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
        action_space = gymnasium.spaces.Discrete(2)
        taken = 0

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.taken = 0
            return self.np_random.uniform(-1, 1, 2).astype("float32"), {}

        def step(self, action):
            self.taken += 1
            return self.np_random.uniform(-1, 1, 2).astype("float32"), 1.0, self.taken >= 20, False, {}
"""


class Trouble(NamedTuple):
    """What is added to the module of the environment, and how the run has to end."""

    code: str
    ends: tuple[int, ...]
    says: str
    words: tuple[str, ...] = ()


def _hook(event: str) -> Trouble:
    code = f"class Hook:\n    {event} = lambda self, {{}}: for_ever()"
    arguments = {"on_start": "run", "on_update": "run, metrics", "on_publish": "run", "on_stop": "run, ended"}[event]
    return Trouble(code.format(arguments), (1,), "the hook", ("--hooks", "./world.py:Hook"))


TROUBLES = {
    **{f"hook {event}": _hook(event) for event in ("on_start", "on_update", "on_publish", "on_stop")},
    "constructor hangs": Trouble("World.__init__ = for_ever", (1,), "--minutes was over while"),
    "reset hangs": Trouble("World.reset = lambda self, **_: for_ever()", (1,), "--minutes was over while"),
    "import hangs": Trouble("for_ever()", (1,), "--minutes was over while"),
    "a thread": Trouble("threading.Thread(target=for_ever).start()", (0,), "did not end within"),
    "an exit handler": Trouble("atexit.register(for_ever)", (0,), "did not end within"),
    "close hangs": Trouble("World.close = for_ever", (0,), ""),
    "os._exit": Trouble("World.step = lambda self, action: os._exit(0)", (1,), "exit"),
}  # fmt: skip


def no_end(folder: Path, rng: random.Random, setup: Setup, trials: int) -> Iterator[dict[str, Any]]:
    """One kind of trouble after the other, from a random one on: the run ends soon after its time, says why, leaves nothing."""
    names = list(TROUBLES)
    first = rng.randrange(len(names))
    for number in range(trials):
        name = names[(first + number) % len(names)]
        trouble, place = TROUBLES[name], folder / str(number)
        place.mkdir()
        (place / "world.py").write_text(f"{textwrap.dedent(WORLD)}\n{trouble.code}\n")
        limits = ["--minutes", str(MINUTES), "--evals", "0", "--run", RUN, *trouble.words]
        with Trainer(place, "train", "./world.py:World", "--mode", setup.mode, *limits) as trainer:

            def ended(trainer: Trainer = trainer) -> bool:
                trainer.note_family()
                time.sleep(0.1)
                return trainer.process.poll() is not None

            took = wait_until(ended, 60 * MINUTES + LATE, name)
            gone = wait_until(lambda t=trainer: not t.left(), 10.0, "processes outlived their trainer")  # type: ignore[misc]
            code, said = trainer.process.returncode, trainer.said()
        yield {
            "survived": code in trouble.ends and trouble.says in said,
            "lost": 0,
            "recover_s": took,
            "trouble": name,
            "code": code,
            "children_gone_s": gone,
            "said": said[-300:],
        }
