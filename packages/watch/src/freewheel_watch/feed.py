"""This module follows one run for all clients that show it, and returns what has changed, section
by section."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from freewheel.errors import FileError
from freewheel.files.read import content, parse_json, tail
from freewheel.metrics import targets
from freewheel.metrics.meter import Budget
from freewheel.metrics.names import SHARES, describe
from freewheel.metrics.workers import STATES
from freewheel.run.live.following import Follower
from freewheel.run.live.status import Status, Worker
from freewheel.sinks.messages import FILE as MESSAGES
from freewheel.timeline.model import KINDS as LOOKS
from freewheel_watch.curve import COLUMNS, KINDS, LastMinute, ThinnedCurve, number

TIMELINE = "timeline.json"  # last minute of a run that was started with --trace
TIMELINE_SIZE = 16 << 20  # bytes
ALERT = 10.0  # seconds for which a worker that has died stays red, even if it was replaced at once
SILENT = 6.0  # seconds without a status after which an active trainer is called silent
NEWEST = 30  # number of messages that are shown
TAIL = 1 << 16  # number of last bytes that are searched for messages
#: Sections that are also needed by clients that only compare a run.
SHARED = ("about", "head", "tail")
WHY = {
    "starting": "its trainer is starting",
    "running": "its trainer is running",
    "silent": "its trainer exists but has not written its status for a while: it is stopped, or the machine is overloaded",
    "ended": "its budget is spent",
    "failed": "it ended with an error",
    "interrupted": "it was stopped; freewheel resume continues it",
    "gone": "its trainer was killed before it wrote a summary; freewheel resume continues it",
}
STATE_WORDS = {
    "construct": ("starts", "Its environment is being created."),
    "reset": ("resets", "The environment starts an episode."),
    "step": ("steps", "The environment takes a step, or the policy chooses an action."),
    "wait-credit": ("waits: learner", SHARES["worker"]["wait-credit"]),
    "wait-slot": ("waits: queue", SHARES["worker"]["wait-slot"]),
    "wait-gate": ("waits: others", SHARES["worker"]["wait-gate"]),
    "down": ("down", SHARES["worker"]["down"]),
    "lost": ("lost", "It was given up, because it failed repeatedly."),
    "pending": ("pending", "The cluster has no room for it yet."),
}
STATE_COLORS = {"construct": "#8a6fd1", "down": "#d02a1e", "lost": "#d02a1e", "pending": "#8a6fd1"}
UNITS = {"steps_per_s": "steps/s", "updates_per_s": "updates/s"}


def words() -> dict[str, Any]:
    """Return the names, meanings and colours of the kinds of time and of the states of workers."""
    states = {
        state: {
            "label": STATE_WORDS[state][0],
            "text": STATE_WORDS[state][1],
            "color": STATE_COLORS.get(state) or LOOKS[state].color,
        }
        for state in STATES
    }
    return {"shares": SHARES, "states": states, "colors": {kind: look.color for kind, look in LOOKS.items()}}


HELLO = {"columns": COLUMNS, "kinds": list(KINDS)}


class RunFeed:
    """Follows a run directory. `poll` reads it. `news` and `everything` return messages for
    clients."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self._follower = Follower(path)
        self._curve = ThinnedCurve()
        self._minute = LastMinute()
        self._row: dict[str, Any] = {}  # the newest row
        self._setup: targets.Setup | None = None
        self._sections: dict[str, str] = {}  # JSON text of each section
        self._sent: dict[str, str] = {}
        self._rows_sent = 0
        self._removals_sent = 0
        self.more = True  # whether more can be read at once

    def poll(self) -> None:
        """Read the directory."""
        news = self._follower.poll()
        if news.kept < self._curve.rows:  # a resume has removed rows
            self._curve.cut(news.kept)
            self._minute.cut(news.kept)
        for row in news.rows:
            self._minute.add(self._curve.rows, row)
            self._curve.add(row)
        if news.rows:
            self._row = clean(news.rows[-1])
        elif not self._curve.rows:
            self._row = {}
        if self._setup is None or "config" in news.changed:
            self._setup = targets.read(self.path)
        self.more = news.more
        self._sections = {name: json.dumps(value, allow_nan=False) for name, value in self._now().items()}

    def news(self) -> tuple[str, str] | None:
        """Return what has changed since the last call, or None. The first text is for clients that
        have the run open, and the second one for clients that compare it."""
        changed = {name: text for name, text in self._sections.items() if self._sent.get(name) != text}
        if self._curve.removals != self._removals_sent:
            self._remember()
            return self.everything(), self.everything(shared=True)
        points = self._curve.points(self._rows_sent)
        recent = self._minute.points(self._rows_sent)
        self._remember()
        if not changed and not points:
            return None
        few = {name: text for name, text in changed.items() if name in SHARED}
        return self._message(changed, points, recent), self._message(few, points, [])

    def everything(self, *, shared: bool = False) -> str:
        """Return the whole state for a client that knows nothing yet."""
        sections = {name: text for name, text in self._sections.items() if not shared or name in SHARED}
        return self._message(sections, self._curve.points(), [] if shared else self._minute.points(), full=True)

    def _remember(self) -> None:
        self._sent = self._sections
        self._rows_sent = self._curve.rows
        self._removals_sent = self._curve.removals

    def _message(
        self, sections: Mapping[str, str], points: Sequence[Any], recent: Sequence[Any], *, full: bool = False
    ) -> str:
        parts = {"name": json.dumps(self.name), "full": json.dumps(full), "points": _compact(points), **sections}
        if recent:
            parts["recent"] = _compact(recent)
        return "{" + ",".join(f'"{name}":{text}' for name, text in parts.items()) + "}"

    # ------------------------------------------------------------------------------------------------------------ sections

    def _now(self) -> dict[str, Any]:
        config = self._follower.config or {}
        status = self._follower.status
        summary = self._follower.summary
        running = self._follower.state == "running"
        alive = status if running and status is not None and status.state == "running" else None
        return {
            "about": _about(config),
            "head": _head(self._row, config, self._state(alive), summary),
            "tail": self._curve.tail,
            "tiles": _tiles(self._row, self._setup, summary, status),
            "workers": None if alive is None else [_worker(one) for one in alive.workers],
            "learner": [] if alive is None else _learner(alive),
            "ledger": _ledger(self._row, summary),
            "messages": self._messages(summary),
            "timeline": self._timeline_stamp(),
        }

    def _state(self, alive: Status | None) -> str:
        state = self._follower.state
        return "silent" if state == "running" and alive is not None and alive.age > SILENT else state

    def _messages(self, summary: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """Return the end of the run and problems of its files, followed by its messages, the newest
        first."""
        ended = summary or {}
        listed = ended.get("problems")
        texts = [ended.get("error"), ended.get("advice"), *(listed if isinstance(listed, list) else ())]
        texts += self._follower.problems.values()
        last = [{"text": text[:2000]} for text in texts if isinstance(text, str) and text]
        return [*last, *read_messages(self.path)][:NEWEST]

    def _timeline_stamp(self) -> str | None:
        with suppress(OSError):
            return str(os.stat(self.path / TIMELINE, follow_symlinks=False).st_mtime_ns)
        return None


def read_timeline(run: Path) -> bytes | None:
    """Return timeline.json of a run unchanged, or None if there is no JSON object."""
    try:
        data = content(run / TIMELINE, TIMELINE_SIZE)
        parse_json(data, TIMELINE, TIMELINE_SIZE)
    except FileError:
        return None
    return bytes(data)


def read_messages(run: Path) -> list[dict[str, Any]]:
    """Return the last messages of a run, the newest first."""
    found: list[dict[str, Any]] = []
    with suppress(FileError):
        for line in reversed(tail(run / MESSAGES, TAIL)[-10 * NEWEST :]):  # more lines, because some may be damaged
            with suppress(FileError):
                message = parse_json(line, MESSAGES)
                if isinstance(text := message.get("text"), str):
                    found.append({"text": text[:2000], "wall_s": number(message.get("wall_s"))})
    return found[:NEWEST]


def _compact(rows: Sequence[Any]) -> str:
    """Return rows as compact JSON. Six decimal places are more than a screen can show."""
    short = [[round(value, 6) if isinstance(value, float) else value for value in row] for row in rows]
    return json.dumps(short, allow_nan=False, separators=(",", ":"))


def clean(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a row and its dropped rows by cause. Other values are removed, because
    other programs may have written the row."""
    found: dict[str, Any] = {name: number(value) for name, value in row.items()}
    dropped = row.get("dropped")
    counts = dropped.items() if isinstance(dropped, Mapping) else ()
    found["dropped"] = {str(cause)[:60]: count for cause, value in counts if (count := number(value)) is not None}
    return found


def _about(config: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: str(config[name])[:200] for name in ("env", "algo", "mode") if isinstance(config.get(name), str)}
    counts = {"seed": config.get("seed"), "workers": config.get("workers"), "envs": config.get("num_envs")}
    return texts | {name: number(value) for name, value in counts.items()}


def budget_of(config: Mapping[str, Any]) -> Budget:
    steps, minutes, episodes = (number(config.get(name)) or None for name in ("steps", "minutes", "episodes"))
    return Budget(steps, minutes, episodes)  # type: ignore[arg-type] # whole numbers, if not damaged


def _head(
    row: Mapping[str, Any], config: Mapping[str, Any], state: str, summary: Mapping[str, Any] | None
) -> dict[str, Any]:
    budget = budget_of(config)
    steps, wall, episodes = (row.get(name) or 0 for name in ("env_steps", "wall_s", "episodes"))
    progress = budget.progress(steps, wall, episodes) if budget != Budget() else None
    left = wall * (1 - progress) / progress if progress and state in ("running", "silent") else None
    ended = str((summary or {}).get("ended") or "")[:200]
    why = f"{WHY.get(state, '')}{f' ({ended})' if ended and state != 'running' else ''}"
    return {
        "state": state,
        "why": why,
        "wall_s": row.get("wall_s"),
        "progress": None if progress is None or not row else round(progress, 4),
        "eta_s": None if left is None else round(left),
    }


def _tiles(
    row: Mapping[str, Any], setup: targets.Setup | None, summary: Mapping[str, Any] | None, status: Status | None
) -> list[dict[str, Any]]:
    """Return the scores, the figures that `targets` judges, and the counts, in this order."""
    ended = summary or {}
    best = number(ended.get("best_eval")) if summary else None if status is None else status.done.best_eval
    episodes = row.get("return_episodes")
    judged = [
        asdict(one)
        | {edge: number(getattr(one, edge)) for edge in ("value", "low", "high")}
        | {"label": one.label[:1].upper() + one.label[1:], "help": _help(one.name)}
        | {"unit": "%" if one.is_share else UNITS.get(one.name, "")}
        for one in targets.judge(row, setup)
    ]
    of = f"mean of the last {episodes:,.0f} episodes" if episodes else "no episode has ended yet"
    score = "none yet" if row.get("eval_return") is None else "" if best is None else f"best so far {best:,.4g}"
    return [
        _tile(row, "return_mean", "Training return", "", of),
        _tile(row, "eval_return", "Evaluation return", "", score),
        *judged,
        _tile(row, "env_steps", "Experience", "steps", f"{row.get('episodes') or 0:,.0f} episodes"),
        _tile(row, "updates", "Learning", "updates", _lag(row)),
    ]


def _tile(row: Mapping[str, Any], name: str, label: str, unit: str, note: str) -> dict[str, Any]:
    about = {"name": name, "label": label, "value": row.get(name), "unit": unit, "note": note, "help": _help(name)}
    return about | {"low": None, "high": None, "state": "plain", "reason": ""}


def _help(name: str) -> str:
    metric = describe(name)
    return "" if metric is None else f"{metric.text} (metric {name})"


def _lag(row: Mapping[str, Any]) -> str:
    lag = row.get("lag_mean")
    return "" if lag is None else f"data is {lag:.2g} updates old"


def _worker(worker: Worker) -> dict[str, Any]:
    alert = STATE_WORDS[worker.state][1] if worker.state in ("down", "lost") else ""
    if not alert and worker.died_s is not None and worker.died_s < ALERT:
        alert = f"it died {worker.died_s:.0f} s ago and was replaced"
    names = ("worker", "state", "steps", "restarts", "pid", "waits_for")
    times = {"since_s": round(worker.since_s, 3), "steps_per_s": round(worker.steps_per_s, 2)}
    return {name: getattr(worker, name) for name in names} | times | {"alert": alert}


def _learner(status: Status) -> list[dict[str, Any]]:
    learner = status.learner
    evaluator = status.evaluator
    parts: list[tuple[str, str, float, str | None]] = [("Learner", learner.doing, learner.since_s, learner.waits_for)]
    if evaluator is not None and evaluator.doing != "idle":
        doing = f"{evaluator.doing}, {evaluator.ended} of {evaluator.episodes} episodes have ended"
        parts.append(("Evaluation", doing, evaluator.since_s, None))
    names = ("name", "doing", "since_s", "waits_for")
    return [dict(zip(names, (name, what, round(since, 3), waits), strict=True)) for name, what, since, waits in parts]


def _ledger(row: Mapping[str, Any], summary: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the ledger of the newest row. A run that has ended uses its summary, which knows what
    was dropped last."""
    known = clean(summary) if summary is not None and number(summary.get("produced")) is not None else row
    if known.get("produced") is None:
        return None
    return {name: known.get(name) for name in ("produced", "trained", "queued", "open", "dropped")}
