"""Event files for TensorBoard: every row over env steps, the settings as text and hyperparameters, and how the run ended."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freewheel.files.reach import check_folder
from freewheel.sinks.sink import RunInfo, SinkEntry
from freewheel.sinks.tracking import findings, last_step, scalars, settings, table

FOLDER = "tensorboard"
#: Options that do not affect learning, so they are not hyperparameters.
ASIDE = (
    "checkpoint_every", "console", "construct_timeout", "log_every", "record_schedule", "reset_timeout", "run", "runs_dir",
    "sinks", "step_timeout", "tensorboard", "trace", "wandb", "wandb_project",
)  # fmt: skip
RESULTS = ("Eval/eval_return", "Episodes/return_mean")  # shown next to the hyperparameters


class EventFile:
    """A new event file in a folder, written with TensorBoard's own writer and flushed after every call."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        check_folder(folder)
        self._writer = EventFileWriter(str(folder))
        self._last = 0

    def forget_after(self, step: int) -> None:
        """Hide what earlier files of the folder have after this step."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(step + 1, session_log=SessionLog(status=SessionLog.START))
        self._last = step

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        found = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(step, summary=Summary(value=found))
        self._last = step

    def text(self, tag: str, markdown: str) -> None:
        from tensorboard.plugins.text import metadata

        self._value(tag, metadata.create_summary_metadata(display_name=tag, description=""), [markdown.encode()])

    def hyperparameters(self, values: Mapping[str, bool | float | str]) -> None:
        """Write the settings of this run for the tab HPARAMS, which shows them next to its returns."""
        from google.protobuf.struct_pb2 import Value
        from tensorboard.plugins.hparams import api_pb2, metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

        kinds = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING}
        infos = [
            api_pb2.HParamInfo(name=name, type=kinds.get(type(value), api_pb2.DATA_TYPE_FLOAT64))
            for name, value in values.items()
        ]
        metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in RESULTS]
        experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=metrics, time_created_secs=time.time())
        started = SessionStartInfo(start_time_secs=time.time())
        for name, value in values.items():
            kind = "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"
            given: dict[str, Any] = {f"{kind}_value": value}
            started.hparams[name].CopyFrom(Value(**given))
        for tag, data in (
            (metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=experiment)),
            (metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=started)),
        ):
            self._value(tag, metadata.create_summary_metadata(data))

    def ended(self, *, well: bool) -> None:
        """Write for the tab HPARAMS how the run ended."""
        from tensorboard.plugins.hparams import api_pb2, metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

        status = api_pb2.STATUS_SUCCESS if well else api_pb2.STATUS_FAILURE
        info = SessionEndInfo(status=status, end_time_secs=time.time())
        data = HParamsPluginData(session_end_info=info)
        self._value(metadata.SESSION_END_INFO_TAG, metadata.create_summary_metadata(data))

    def close(self) -> None:
        self._writer.close()

    def _value(self, tag: str, metadata: Any, words: list[bytes] | None = None) -> None:
        """Write a value that is not a number, at the step of the last scalars."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING

        nothing: dict[str, Any] = {"dtype": DT_FLOAT, "float_val": [0.0]}
        tensor = TensorProto(**nothing if words is None else {"dtype": DT_STRING, "string_val": words})
        self._add(self._last, summary=Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)]))

    def _add(self, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, **what))
        self._writer.flush()


class TensorBoardSink:
    """Writes RUN/tensorboard. SinkGuard calls it in a separate thread. Implements sink.Sink."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._file: EventFile | None = None
        self._step = self._kept = last_step(run.path / "metrics.jsonl") if run.resumed else 0

    def write(self, row: Mapping[str, Any]) -> None:
        self._step = int(row["env_steps"])
        self._opened().scalars(self._step, scalars(row))

    def note(self, text: str) -> None:
        """Ignore notes: they are not charts."""

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            if found := findings(summary):
                self._file.scalars(self._step, found)
            self._file.ended(well=summary.get("exit_code") == 0)
        finally:
            self._file.close()

    def _opened(self) -> EventFile:
        """Return the event file, which is a new one in every session of a run."""
        if self._file is None:
            run, given = self._run, settings(self._run.config)
            earlier = (run.path / FOLDER).is_dir()  # also after a session without a checkpoint
            self._file = EventFile(run.path / FOLDER)
            if earlier:
                self._file.forget_after(self._kept)
            self._file.text("config", table(given, ("option", "value")))
            self._file.hyperparameters({name: value for name, value in given.items() if name not in ASIDE})
        return self._file


def _open(run: RunInfo) -> TensorBoardSink:
    folder = shlex.quote(str(run.path.parent))  # TensorBoard would call a single run "."
    run.say(f"TensorBoard: tensorboard --logdir {folder}")
    return TensorBoardSink(run)


SINK = SinkEntry("tensorboard", _open, needs=("tensorboard", "tensorboard"))
