"""Run directories that somebody else has made, given to real commands: links that lead outside, files that take long to read, and
texts that act on a terminal.

A trial has survived if the command ends soon and without a traceback, nothing outside of the run has changed, and nothing
that was printed acts on a terminal.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

LIMIT = 60.0  # seconds that a command may take, start and training included, on a busy machine
SMALL = ["--num-envs", "2", "--evals", "1", "--eval-episodes", "1", "--policy.hidden", "8", "8", "--trace"]
EVIL = "E\x1b[31m\x1b]52;c;aGk=\x07\x9b2J\r\nfreewheel: fine\u202e[/red]"
COMMANDS = {
    "runs": ["runs"],
    "eval": ["eval", "it", "--episodes", "1"],
    "resume": ["resume", "it", "--steps", "512"],
    "doctor": ["doctor", "--why-stuck", "it"],
    "timeline": ["timeline", "it", "--html", "runs/it/page.html"],
    "export": ["export", "it"],
    "train": ["train", "--config", "runs/it/config.json", "--run", "new", "--steps", "256"],
    "watch": ["watch", "--port", "0", "--no-open"],
}


def _linked(name: str, hard: bool = False) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path, there = run / name, run.parents[1] / "other" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if not there.exists():
            there.write_text("{}\n")
        os.link(there, path) if hard else path.symlink_to(there)

    return change


def _text(name: str, text: Callable[[], str]) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).write_text(text())

    return change


def _says(name: str, **values: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        known = json.loads((run / name).read_text())
        known.pop("sha256", None)
        (run / name).write_text(json.dumps(known | values))

    return change


def _keys(count: int) -> str:
    return '{"env":"CartPole-v1",' + ",".join(f'"{key:x}":1' for key in range(count)) + f',"{count - 1:x}":1}}'


DEEDS: Mapping[str, Callable[[Path], None]] = {
    **{f"link: {name}": _linked(name) for name in ("metrics.jsonl", "messages.jsonl", "checkpoints", "summary.json",
                                                   ".part-status.json", "page.html", "export", "config.json")},
    "hard link": _linked("metrics.jsonl", hard=True),
    "600,000 keys": _text("config.json", lambda: _keys(600_000)),
    "300,000 keys": _text("config.json", lambda: _keys(300_000)),
    "brackets": _text("summary.json", lambda: '{"a":' + "[" * 10**6 + "]" * 10**6 + "}"),
    "a long status": _text("status.json", lambda: '{"a":"' + "x" * (20 << 20) + '"}'),
    "empty lines": _text("metrics.jsonl", lambda: "\n" * (40 << 20)),
    "text: config": _says("config.json", env=EVIL, algo=EVIL),
    "text: summary": _says("summary.json", ended=EVIL, error=EVIL, problems=[EVIL], exit_code=1),
}  # fmt: skip


def hostile(folder: Path, rng: random.Random, setup: Any, trials: int) -> Iterator[dict[str, Any]]:
    """Every deed with every command, in a random order."""
    words = ["train", "CartPole-v1", "--mode", setup.mode, *SMALL, "--steps", "256", "--run", "it"]
    if (made := _call(folder, words))[0] != 0:
        raise RuntimeError(made[1])
    good = folder / "good"
    (folder / "runs" / "it").rename(good)
    pairs = [(deed, command) for deed in DEEDS for command in COMMANDS]
    for number, (deed, command) in enumerate(rng.choices(pairs, k=trials)):
        place = folder / str(number)
        for name in ("runs/it", "other"):
            shutil.copytree(good, place / name, symlinks=True)
        DEEDS[deed](place / "runs" / "it")
        before = _content(place / "other")
        code, said, took = _call(place, COMMANDS[command])
        signs = re.sub(r"\x1b\[[0-9;?]*[mKAhl]", "", said).replace("\n", "").replace("\r", "")
        whole = code in (0, 1, 2, 3) and "Traceback" not in said and "\nfreewheel: fine" not in said
        kept = _content(place / "other") == before
        survived = whole and kept and signs.isprintable() and took <= LIMIT
        yield {
            "survived": survived, "lost": 0, "recover_s": took, "deed": deed, "command": command, "code": code,
            "outside": "as it was" if kept else "CHANGED", "said": "" if survived else said[-500:],
        }  # fmt: skip
        shutil.rmtree(place)


def _call(place: Path, words: list[str]) -> tuple[int, str, float]:
    """A command: its exit code, what it printed, and how long it took; `watch` is ended as soon as it serves its page."""
    began = time.monotonic()
    argv = [sys.executable, "-m", "freewheel", *words]
    with subprocess.Popen(argv, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        late = threading.Timer(LIMIT, process.kill)
        late.start()
        said = b""
        if words[0] == "watch":
            said = process.stdout.readline()
            process.send_signal(signal.SIGINT)
        said += process.stdout.read()
        process.wait()
        late.cancel()
    return process.returncode, said.decode(errors="surrogateescape"), time.monotonic() - began


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
