"""`freewheel train --federate` as a user runs it: interrupted, resumed, and then used like any other run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import freewheel
from freewheel.cli.main import main
from freewheel.run.checkpoints import checkpoint

pytest.importorskip("ray")

OPTIONS = ["--num-envs", "4", "--num-steps-per-env", "32", "--steps", "6144", "--evals", "2", "--eval-episodes", "4"]


@pytest.mark.system
@pytest.mark.timeout(180)
def test_an_interrupted_federation_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "CartPole-v1", "--federate", "12", "--sites", "2", "--run", "f", "--site-report", "returns"]
    command = [sys.executable, "-m", "freewheel", *words, *OPTIONS]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("round 2 of 12"):
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130, lines
    path = tmp_path / "runs" / "f"
    first = json.loads((path / "summary.json").read_text())
    assert first["ended"] == "interrupted (SIGINT)"
    assert 2 <= first["rounds"] < 12
    for site in ("site-1", "site-2"):
        ended = json.loads((path / "sites" / site / "summary.json").read_text())
        assert ended["exit_code"] in (0, 143), "it ended cleanly, or it was interrupted"

    monkeypatch.chdir(tmp_path)
    assert main(["resume", "f", "--steps", "5"]) == 2, "it has rounds"
    assert main(["resume", "f"]) == 0
    summary = json.loads((path / "summary.json").read_text())
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(1, 13))
    assert (summary["ended"], summary["rounds"], summary["exit_code"]) == ("rounds", 12, 0)
    assert summary["env_steps"] == rows[-1]["env_steps"] == sum(row["rows"] for row in rows)
    assert all(row["sites"] == 2 and row["distance"] > 0 and row["return_mean"] > 0 for row in rows)
    weights = sum(value.nbytes for value in checkpoint.load(path / "checkpoints").params.values())
    assert all(2 * weights <= row["bytes_in"] <= 2 * weights + 10_000 for row in rows)
    for site in ("site-1", "site-2"):
        assert "continuing" in (path / "sites" / site / "messages.jsonl").read_text(), "with its optimiser and its rows"
        assert summary["sites"][site]["rounds"] == 12
    assert main(["resume", "f"]) == 0
    assert "is complete: 12 of 12 rounds are done" in capfd.readouterr().out
    assert main(["eval", "f", "--episodes", "2"]) == 0
    assert freewheel.load(path).predict([0.0] * 4)[0] in (0, 1)


@pytest.mark.timeout(300)
@pytest.mark.long
def test_two_sites_with_other_variants_learn_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "poles.py").write_text(
        "import gymnasium\n"
        "def pole(length=0.5):\n"
        "    env = gymnasium.make('CartPole-v1')\n"
        "    env.unwrapped.length = length\n"
        "    env.unwrapped.polemass_length = env.unwrapped.masspole * length\n"
        "    return env\n"
    )
    (tmp_path / "sites.toml").write_text("[short]\nenv_args = {length = 0.25}\n[long]\nenv_args = {length = 1.5}\n")
    words = ["train", "./poles.py:pole", "--federate", "30", "--sites", "sites.toml", "--trust", "--steps", "60000"]
    words += ["--run", "f", "--num-envs", "8", "--num-steps-per-env", "64", "--site-report", "returns"]
    assert main(words) == 0
    rows = [json.loads(line) for line in (tmp_path / "runs" / "f" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["return_mean"] for row in rows) >= 400, "a site that fails plays many short episodes"
