"""TensorBoard and wandb: the same metrics in the same groups as metrics.jsonl has, also after a resume, without an account."""

from __future__ import annotations

import importlib.util
import json
import socket
import time
from collections import deque
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.errors import SetupError
from freewheel.metrics import names
from freewheel.metrics.meter import Budget
from freewheel.sinks import tensorboard, tracking, wandb
from freewheel.sinks.sink import RunInfo
from tests.support.runs import rows_of, train
from tests.support.trackers import tensorboard_events, wandb_history, wandb_records

ASKED_FOR = {"Async", "Buffers", "Perf", "Loss", "Eval", "Resource"}


@pytest.fixture(autouse=True)
def without_an_account(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


def info(path: Path, **more: Any) -> RunInfo:
    about = {"title": "CartPole-v1  ppo  batch", "budget": Budget(), "algorithm": "ppo", "mode": "batch", **more}
    return RunInfo(path=path, project="tests", **about)


def test_every_described_metric_has_a_group_in_trackers() -> None:
    described = [metric.name for metrics in names.GROUPS.values() for metric in metrics]
    groups = {name: names.chart(name).partition("/")[0] for name in described}
    assert set(names.CHARTS) == set(names.GROUPS)
    assert set(groups.values()) == {*ASKED_FOR, "Progress", "Episodes", "Model"}
    assert len({names.chart(name) for name in described}) == len(described)  # no two become one chart
    for pattern in names.ELSEWHERE:
        assert any(fnmatchcase(name, pattern) for name in described), pattern


def test_names_in_trackers() -> None:
    ours = ["Async/lag_max", "Buffers/queue_util", "Resource/cpu_util", "Perf/learner_busy", "Eval/eval_return"]
    ours += ["Async/replay/lag_max", "Buffers/replay/drawn", "Buffers/queue/fragments", "Episodes/measure/compliance"]
    expected = {chart.partition("/")[2]: chart for chart in ours}
    expected |= {"loss/policy": "Loss/policy", "policy/kl": "Loss/policy/kl", "eval/compliance": "Eval/compliance"}
    expected |= {"model/holdout": "Model/holdout", "my/score": "my/score", "score": "User/score"}
    expected |= {"Loss/policy": "User/Loss/policy"}  # a user's own, beside ours
    assert {name: names.chart(name) for name in expected} == expected


def test_unknown_values_are_left_out_and_causes_are_charts_of_their_own() -> None:
    row = {"env_steps": 8, "return_mean": None, "dropped": {"stale": 2, "nan": 1}, "loss/policy": 0.5}
    dropped = {"Buffers/dropped/stale": 2.0, "Buffers/dropped/nan": 1.0}
    assert tracking.scalars(row) == {"Progress/env_steps": 8.0, **dropped, "Loss/policy": 0.5}


def test_settings_are_flat_and_say_nothing_of_their_sources() -> None:
    config = {"env": "X", "ppo": {"lr": 1e-3, "clip": None}, "hooks": ["a:B"], "tensorboard": True}
    config |= {"sources": {"env": "flag"}}
    assert tracking.settings(config) == {"env": "X", "ppo.lr": 1e-3, "hooks": '["a:B"]', "tensorboard": True}


class Scores:
    """A hook with metrics of its own."""

    def on_update(self, run: Any, metrics: Mapping[str, Any]) -> None:
        run.log("score", 3.0)
        run.log("my/other", float(run.updates))


def test_both_hold_what_metrics_jsonl_holds_over_two_sessions(tmp_path: Path) -> None:
    first = train(tmp_path, run="both", steps=320, hooks=[Scores()], tensorboard=True, sinks=["wandb"])
    result = freewheel.resume(first.path, steps=640, quiet=True, hooks=[Scores()])
    told = [tracking.scalars(row) for row in rows_of(result)]
    assert {"User/score", "my/other", "Eval/eval_return"} <= set(told[-1])
    history = wandb_history(result.path)
    assert [row for row in history if row in told] == told
    ended = [row["Progress/env_steps"] for row in history if row not in told]
    assert set(ended) == {320}  # of the first session, whose end was not the run's
    events = tensorboard_events(result.path / "tensorboard")
    for tag in sorted({name for row in told for name in row}):
        expected = [(int(row["Progress/env_steps"]), row[tag]) for row in told if tag in row]
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in found] == [step for step, _ in expected], tag
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6)
    times = [event.wall_time for event in events.Scalars("Progress/env_steps")]
    assert times == sorted(times)
    assert time.time() - 600 < times[0] <= times[-1] <= time.time()
    assert [event.value for event in events.Scalars("Eval/best_eval")][-1] == pytest.approx(result.summary["best_eval"])
    (run,) = {record.run.run_id for record in wandb_records(result.path) if record.HasField("run")}
    assert run == json.loads((result.path / "wandb/freewheel.json").read_text())["id"]
    config = {item.key: json.loads(item.value_json) for item in next(
        record.run.config.update for record in wandb_records(result.path) if record.HasField("run")
    )}  # fmt: skip
    assert (config["ppo.lr"], config["seed"], config["steps"]) == (3e-4, 0, 320)
    (text, *_) = events.Tensors("config")
    assert "| `ppo.lr` | 0.0003 |" in text.tensor_proto.string_val[0].decode()
    assert "_hparams_/session_end_info" in events.Tags()["tensors"]


def test_rows_after_the_point_of_a_resume_are_not_shown_twice(tmp_path: Path) -> None:
    for resumed, steps in ((False, (10, 20, 30, 40)), (True, (25, 35))):
        (tmp_path / "metrics.jsonl").write_text('{"env_steps": 10}\n{"env_steps": 20}\n')
        sink = tensorboard.TensorBoardSink(info(tmp_path, resumed=resumed))
        for step in steps:
            sink.write({"env_steps": step, "loss/policy": 1.0 / step})
        sink.close({"exit_code": 0})
    events = tensorboard_events(tmp_path / "tensorboard")
    assert [event.step for event in events.Scalars("Loss/policy")] == [10, 20, 25, 35]


def test_a_run_without_rows_leaves_nothing(tmp_path: Path) -> None:
    for sink in (tensorboard.TensorBoardSink(info(tmp_path)), wandb.WandbSink(info(tmp_path))):
        sink.note("starting")
        sink.close({"exit_code": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_refused_before_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(SetupError, match=rf"sinks=\[\"{name}\"\] needs {name}: pip install 'freewheel\[{name}\]'"):
        train(tmp_path, sinks=[name])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_does_not_end_a_run(tmp_path: Path) -> None:
    class Spoil:
        def on_start(self, run: Any) -> None:
            (run.path / "tensorboard").write_text("in the way")

    result = train(tmp_path, steps=320, evals=0, tensorboard=True, hooks=[Spoil()])
    assert (result.exit_code, result.summary["env_steps"]) == (0, 320)
    (problem,) = result.summary["problems"]
    assert problem.startswith("the sink tensorboard has missed ")


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_MODE": "online"}, "offline"),  # it would have to ask for a key
        ({"WANDB_API_KEY": "k" * 40}, "online"),
        ({"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "disabled"}, "disabled"),
        ({"NETRC": "here"}, "online"),
        ({"NETRC": "here", "WANDB_BASE_URL": "https://wandb.example.org"}, "offline"),
        ({"NETRC": "absent"}, "offline"),
    ],
)
def test_wandb_needs_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], mode: str) -> None:
    (tmp_path / "here").write_text(f"machine api.wandb.ai login user password {'k' * 40}\n")
    (tmp_path / "here").chmod(0o600)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value) if name == "NETRC" else value)
    assert wandb.mode() == mode


def test_a_server_that_does_not_answer_leaves_the_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # nobody listens
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setattr(wandb, "CONNECT", 0.2)
        sink = wandb.WandbSink(info(tmp_path))
        sink.write({"env_steps": 10, "loss/policy": 0.5})
        (told,) = sink.news
        offline = f"wandb does not answer, so the run is kept offline; to upload: wandb sync {tmp_path}/wandb/"
        assert told.startswith(offline)
        sink.close({"exit_code": 0})
    assert wandb_history(tmp_path) == [{"Progress/env_steps": 10, "Loss/policy": 0.5}]


def test_what_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = deque[str]()
    assert tensorboard.SINK.open(info(tmp_path, say=said.append)) is not None
    assert said.popleft() == f"TensorBoard: tensorboard --logdir {tmp_path.parent}", "the run has a name there"
    assert wandb.SINK.open(info(tmp_path, say=said.append)) is not None
    assert said.popleft() == f"wandb: offline, no key is needed; to upload: wandb sync {tmp_path}/wandb/offline-run-*"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb.SINK.open(info(tmp_path, say=said.append)) is None
    assert said.popleft() == "wandb is disabled (WANDB_MODE)"
