"""R17: nothing that a file, a name or an environment says acts on the terminal that it is printed on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freewheel.cli import main as cli
from freewheel.errors import EnvError, printable
from freewheel.files.stdout import complain
from freewheel.run.planning import print_line
from freewheel_watch.tui import TerminalView
from tests.support.runs import good_run

#: Colours, a title, the clipboard, a link, 8-bit control, bell, return, a new line, reversed writing, markup.
EVIL = "E\x1b[31mx\x1b]0;t\x07\x1b]52;c;aGk=\x07\x1b]8;;http://x\x1b\\\x9b2J\x07\r\nfreewheel: fine\u202e\u2066[bold][/red]\x7f"
#: What may be in what we print: text, and what Rich says to a terminal for our own colours and lines.
OURS = re.compile(r"\x1b\[[0-9;?]*[mKAhlG]")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = good_run(tmp_path_factory.mktemp("runs"), checkpoint_every=0)  # one, which nothing can take the place of
    (run / "timeline.json").write_text(json.dumps(_timeline()))
    return run


def _timeline() -> dict[str, Any]:
    from freewheel.timeline.model import Row, Span, Timeline

    return Timeline([Row(EVIL, "envs", [Span("step", 0.0, 1.0, EVIL)])], {EVIL: EVIL}, 0.0, 1.0).to_json()


def change(path: Path, **values: Any) -> None:
    data = json.loads(path.read_text()) if path.exists() else {}
    data.pop("sha256", None)
    path.write_text(json.dumps(data | values))


HOSTILE: dict[str, Callable[[Path], object]] = {
    "env": lambda run: change(run / "config.json", env=EVIL),
    "algo": lambda run: change(run / "config.json", algo=EVIL, mode=EVIL),
    "a name": lambda run: change(run / "config.json", run=EVIL.partition("\r")[0].replace("/", "")),
    "an option": lambda run: change(run / "config.json", **{EVIL: 1}),
    "a value": lambda run: change(run / "config.json", num_envs=[EVIL]),
    "an argument": lambda run: change(run / "config.json", env_args={EVIL: EVIL}),
    "error": lambda run: change(run / "summary.json", ended=EVIL, exit_code=1, error=EVIL, problems=[EVIL]),
    "policy": lambda run: change(run / "checkpoints/64/policy.json", env=EVIL),
    "manifest": lambda run: change(run / "checkpoints/64/manifest.json", files={EVIL: EVIL}),
    "checkpoints": lambda run: (run / "checkpoints/64").rename(run / "checkpoints" / EVIL.replace("/", "")),
    "name": lambda run: run.rename(run.with_name(EVIL.replace("/", ""))),
}  # fmt: skip
COMMANDS = (
    ["runs"], ["doctor", "--why-stuck", "one"], ["eval", "one"], ["play", "one", "--render", "none"], ["resume", "one"],
    ["timeline", "one"], ["replay", "one"], ["export", "one"], ["train", "--config", "runs/one/config.json"],
    ["compare", "--report", "runs/one/config.json"], ["train", "--config", "runs/one/config.json", "--dry-run"],
)  # fmt: skip


def harmless(text: str) -> bool:
    return OURS.sub("", text).replace("\n", "").isprintable()


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_no_command_prints_what_acts_on_a_terminal(
    name: str, terminal: bool, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    shutil.copytree(good, tmp_path / "runs" / "one", symlinks=True)
    HOSTILE[name](tmp_path / "runs" / "one")
    for command in COMMANDS:
        if (
            command[0] in ("train", "resume")
            and name in ("a name", "error", "policy", "manifest", "checkpoints")
            and command[-1] != "--dry-run"
        ):
            continue  # they would train
        cli.main(command)
        out, err = capfd.readouterr()
        assert harmless(out), (command, out)
        assert harmless(err), (command, err)
        assert not any(line.startswith("freewheel: fine") for line in f"{out}\n{err}".splitlines()), (command, out, err)


def test_the_terminal_view_shows_a_hostile_run_line_by_line(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "one", symlinks=True)
    for name in ("env", "error"):
        HOSTILE[name](tmp_path / "one")
    view = TerminalView(tmp_path)
    view.look()
    for line in view.lines(120, 40):
        assert line.plain.isprintable(), line.plain


def test_messages_and_errors_of_environments_are_shown_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    from freewheel.sinks.classic import ClassicLines, ClassicSink
    from freewheel.sinks.console import ConsoleSink

    for say in (complain, print_line, ClassicSink(ClassicLines()).note, lambda text: complain(str(EnvError(text)))):
        say(EVIL)
    shown = capsys.readouterr()
    assert harmless(shown.out + shown.err)
    assert shown.out.count("\\x1b[31m") == 2
    ConsoleSink("title", _budget()).note(EVIL)
    text = capsys.readouterr().out
    assert harmless(text)
    assert "[bold][/red]" in text


def _budget() -> Any:
    from freewheel.metrics.meter import Budget

    return Budget(10, None, None)


def test_what_can_be_seen_stays() -> None:
    assert printable("ü € 漢 ░▒ |") == "ü € 漢 ░▒ |"
    assert printable("\u200d\xa0\U00018cd6") == "\u200d\xa0\U00018cd6"
    assert printable("a\n\x1b\ud800\u202e", "\n") == "a\n\\x1b\\ud800\\u202e"


def test_the_name_of_an_environment_is_no_markup(capfd: pytest.CaptureFixture[str]) -> None:
    assert [cli.main([*command, "[/x]"]) for command in (["check"], ["compare", "--dry-run"])] == [1, 1]
    assert capfd.readouterr().err.count("cannot make '[/x]'") == 1
