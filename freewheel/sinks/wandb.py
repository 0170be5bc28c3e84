"""Weights & Biases: every row over env steps, and the settings. Without a key or network, files wait for an upload."""

from __future__ import annotations

import json
import netrc
import os
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from freewheel.files import disk
from freewheel.files.read import json_object
from freewheel.sinks.sink import RunInfo, SinkEntry
from freewheel.sinks.tracking import STEPS, findings, scalars, settings

FOLDER, KNOWN = "wandb", "freewheel.json"  # a folder in the run directory; its file with wandb's id of the run
CONNECT = 20.0  # seconds to wait for a server that does not answer
Mode = Literal["online", "offline", "disabled"]


def mode() -> Mode:
    """Return "online" only if a key is configured, so that wandb never asks for one. WANDB_MODE may restrict it."""
    wanted = os.environ.get("WANDB_MODE", "")
    if wanted == "disabled":
        return "disabled"
    return "online" if _has_key() and wanted not in ("offline", "dryrun") else "offline"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    given = os.environ.get("NETRC")
    places = [Path(given)] if given else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for place in places:
        try:
            if place.is_file() and netrc.netrc(str(place)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


class Tracked:
    """A run of wandb, with files in `folder`/wandb. Its helper process ends with it."""

    def __init__(self, folder: Path, axis: str | None = None, **about: Any) -> None:
        """`axis`: the metric that all others are charted over; `about`: arguments of wandb.init."""
        self.news: list[str] = []  # messages for the user
        chosen = mode()
        self.online = chosen == "online"
        try:
            self._run = self._begin(folder, chosen, about)
        except Exception as error:
            if chosen != "online":
                raise
            _end_service()
            self.online = False
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.news.append(f"wandb does not answer, so the run is kept offline; {how_to_sync(folder)} ({why})")
            self._run = self._begin(folder, "offline", about)
        if axis is not None:
            self._run.define_metric(axis)
            self._run.define_metric("*", step_metric=axis)

    @staticmethod
    def _begin(folder: Path, chosen: Mode, about: Mapping[str, Any]) -> Any:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb reads it on import, and then sends only the run
        import wandb

        options = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True, init_timeout=CONNECT
        )
        return wandb.init(dir=str(folder), mode=chosen, settings=options, reinit="create_new", **about)

    def log(self, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def conclude(self, values: Mapping[str, Any]) -> None:
        """Set the values that tables show for the run."""
        self._run.summary.update(dict(values))

    def close(self, exit_code: int) -> None:
        try:
            self._run.finish(exit_code=exit_code)
        finally:
            _end_service()


def _end_service() -> None:
    """End wandb's helper process, unless the user has another run in this process."""
    import wandb

    if wandb.run is None:
        wandb.teardown()


def how_to_sync(folder: Path) -> str:
    return f"to upload: wandb sync {folder / FOLDER}/offline-run-*"


class WandbSink:
    """Writes RUN/wandb. SinkGuard calls it in a separate thread. Implements sink.Sink."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._tracked: Tracked | None = None
        self.news: deque[str] = deque()

    def write(self, row: Mapping[str, Any]) -> None:
        self._opened().log(scalars(row))

    def note(self, text: str) -> None:
        """Ignore notes: they are not charts."""

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._tracked is None:
            return
        try:
            ended = {"ended": summary.get("ended"), "exit_code": summary.get("exit_code")}
            self._tracked.conclude(findings(summary) | ended)
        finally:
            self._tracked.close(int(summary.get("exit_code", 1)))

    def _opened(self) -> Tracked:
        if self._tracked is None:
            run, given = self._run, settings(self._run.config)
            self._tracked = Tracked(
                run.path,
                STEPS,
                id=_identity(run.path / FOLDER / KNOWN),
                resume="allow" if run.resumed and mode() == "online" else None,
                project=run.project,
                name=run.path.name,
                group=run.title.replace("  ", " "),
                job_type="train",
                tags=[run.algorithm, run.mode],
                config=given,
            )
            self.news += self._tracked.news
        return self._tracked


def _identity(path: Path) -> str:
    """Return wandb's id of the run, which is the same in every session."""
    if path.is_file():
        return str(json_object(path).get("id") or "")
    found = secrets.token_hex(4)
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.replace(path, json.dumps({"format": 1, "id": found}).encode() + b"\n")
    return found


def _open(run: RunInfo) -> WandbSink | None:
    chosen = mode()
    if chosen == "disabled":
        run.say("wandb is disabled (WANDB_MODE)")
        return None
    where = f"project {run.project}" if chosen == "online" else f"offline, no key is needed; {how_to_sync(run.path)}"
    run.say(f"wandb: {where}")
    return WandbSink(run)


SINK = SinkEntry("wandb", _open, needs=("wandb", "wandb"))
