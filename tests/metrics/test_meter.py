"""The meter: rates and shares in closed form, by a clock that the test moves."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.core import LEARNER_TIME, WORKER_TIME, Chunk, Episode, Metrics, Origin, RowCounts, Tick, Transitions
from freewheel.metrics import meter as meter_module
from freewheel.metrics.load import Usage, gpu_util, usage
from freewheel.metrics.meter import Budget, Meter

KEYS = [
    *("wall_s", "env_steps", "episodes", "updates", "steps_per_s", "episodes_per_s", "updates_per_s"),
    *("return_mean", "return_episodes", "length_mean", "lag_mean", "lag_max"),
    *("queue_util", "buffer_util", "cpu_util", "gpu_util"),
    *("env_busy", "learner_busy", "produced", "trained", "queued", "open", "dropped"),
]
EXTRA = [
    *(f"time/learner_{kind.replace('-', '_')}" for kind in LEARNER_TIME),
    *(f"time/worker_{kind.replace('-', '_')}" for kind in WORKER_TIME),
    *("memory/trainer_mb", "memory/workers_mb"),
]
ROWS = RowCounts(produced=10, trained=6, queued=1, open=1, dropped={"stale": 2})


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> Meter:
    return Meter(workers=2, now=clock)


def chunk(rows: int, *ends: tuple[float, int], **ns: int) -> Chunk:
    """A chunk of so many rows with episodes of (return, length); time in ns by kind, with `_` for `-`."""
    nothing = np.zeros((0, 1))
    data = Transitions(*[nothing] * 8)
    episodes = tuple(Episode(0, k, 0, (), ret, length, 0.0, ()) for k, (ret, length) in enumerate(ends))
    spent = np.array([ns.get(kind.replace("-", "_"), 0) for kind in WORKER_TIME], np.int64)
    return Chunk(data, 0, Origin(0, 0, 0, 0), episodes, nothing, spent, rows)


def tick(*chunks: Chunk, metrics: Mapping[str, object] | None = None) -> Tick:
    values: Metrics | None = metrics  # type: ignore[assignment] # learners may hand over tensors
    return Tick(chunks, sum(part.rows for part in chunks), 0, values)


def row(meter: Meter) -> dict[str, object]:
    return meter.row(ROWS, {}, None)


def test_the_speed_is_that_of_the_environments_and_not_of_fragments_they_hand_over(meter: Meter, clock: Clock) -> None:
    speeds = []
    for seconds, produced in ((0, 0), (2, 100), (2, 200), (2, 320), (2, 500), (2, 720), (10, 740), (10, 740)):
        clock.pass_by(seconds)
        meter.restore(meter.state())
        speeds.append(meter.row(RowCounts(produced=produced, open=produced), {}, None)["steps_per_s"])
    assert speeds == [None, 50.0, 50.0, pytest.approx(320 / 6), 62.5, 72.0, 2.0, 0.0], "of the last ten seconds"


def test_a_row_has_the_public_keys_and_nulls_before_anything_happened(meter: Meter, clock: Clock) -> None:
    clock.pass_by(2.0)
    first = row(meter)
    assert (meter.longest, first["return_episodes"]) == (None, 0)
    assert list(first) == [*KEYS, *EXTRA]
    nulls = ["return_mean", "length_mean", "lag_mean", "lag_max", "queue_util", "buffer_util", "gpu_util", "env_busy"]
    assert [key for key in KEYS if first[key] is None] == nulls
    assert first["wall_s"] == 2.0
    assert (first["produced"], first["trained"], first["queued"], first["open"]) == (10, 6, 1, 1)
    assert first["dropped"] == {"stale": 2}
    json.dumps(first, allow_nan=False)


def test_rates_are_over_the_wall_time(meter: Meter, clock: Clock) -> None:
    meter.take(tick(chunk(64, (10.0, 20)), chunk(36), metrics={}))
    clock.pass_by(4.0)
    first = meter.row(RowCounts(produced=100), {}, None)
    assert (first["env_steps"], first["episodes"], first["updates"]) == (100, 1, 1)
    assert (first["steps_per_s"], first["episodes_per_s"], first["updates_per_s"]) == (25.0, 0.25, 0.25)
    meter.take(tick(chunk(10), metrics={}))
    meter.take(tick())
    meter.take(tick(metrics={}))
    clock.pass_by(0.5)
    second = meter.row(RowCounts(produced=110), {}, None)
    assert (second["wall_s"], second["env_steps"], second["episodes"], second["updates"]) == (4.5, 110, 1, 3)
    rates = (second["steps_per_s"], second["episodes_per_s"], second["updates_per_s"])
    assert rates == pytest.approx((110 / 4.5, 1 / 4.5, 3 / 4.5))


@pytest.mark.parametrize(("ended", "shown"), [(3, 3), (10, 10), (99, 10), (250, 25), (1000, 100), (5000, 100)])
def test_returns_and_lengths_are_means_over_the_newest_tenth_of_episodes(meter: Meter, ended: int, shown: int) -> None:
    meter.take(tick(chunk(1, *[(float(k), 2 * k) for k in range(ended)])))
    first = row(meter)
    assert first["return_episodes"] == meter.totals()["return_episodes"] == shown
    assert first["return_mean"] == np.mean(range(ended - shown, ended))
    assert first["length_mean"] == np.mean(range(2 * (ended - shown), 2 * ended, 2))
    assert meter.longest == 2 * (ended - 1)


def test_means_are_over_the_updates_that_report_a_metric_and_unknown_names_are_kept(meter: Meter) -> None:
    meter.take(tick(metrics={"loss/policy": np.float32(1.0), "loss/rare": 5, "somebody_elses": 1.0}))
    meter.take(tick(metrics={"loss/policy": np.float32(2.0)}))
    both = row(meter)
    assert list(both) == [*KEYS, "loss/policy", "loss/rare", "somebody_elses", *EXTRA]
    assert (both["loss/policy"], both["loss/rare"], both["somebody_elses"]) == (1.5, 5.0, 1.0)
    assert list(row(meter)) == [*KEYS, *EXTRA]  # no update, no loss


def test_the_newest_value_is_repeated_where_a_metric_is_a_total(meter: Meter) -> None:
    meter.take(tick(metrics={"real_data": 64, "model/version": torch.tensor(1.0)}))
    meter.take(tick(metrics={"real_data": 128, "model/version": torch.tensor(2.0)}))
    for _ in range(2):
        shown = {name: row(meter)[name] for name in ("real_data", "model/version")}
        assert json.dumps(shown) == '{"real_data": 128, "model/version": 2.0}'
    totals = meter.totals()
    assert (totals["real_data"], "model/version" in totals) == (128, False)


def test_a_tensor_that_its_learner_overwrites_was_already_booked(meter: Meter) -> None:
    loss = torch.tensor(1.0)
    meter.take(tick(metrics={"loss/value": loss}))
    loss.fill_(3.0)
    meter.take(tick(metrics={"loss/value": loss}))
    loss.fill_(99.0)
    value = row(meter)["loss/value"]
    assert (type(value), value) == (float, 2.0)


def test_lag_comes_from_the_learner(meter: Meter) -> None:
    meter.take(tick(metrics={"lag_mean": 0.5, "lag_max": 2}))
    meter.take(tick(metrics={"lag_mean": np.float64(1.5), "lag_max": np.int64(1)}))
    first = row(meter)
    assert (first["lag_mean"], first["lag_max"]) == (1.0, 2.0)
    meter.take(tick(metrics={"lag_mean": 1.0, "lag_max": 1.0}))
    assert row(meter)["lag_max"] == 1.0
    assert row(meter)["lag_max"] is None
    assert meter.totals()["lag_max"] == 2.0


def test_time_that_is_no_part_of_the_run_is_nowhere(meter: Meter, clock: Clock) -> None:
    meter.begin()
    clock.seconds += 7.0
    meter.spare(6.0)
    with meter.span("update"):
        clock.seconds += 1.0
    row = meter.row(ROWS, {}, None)
    assert (meter.wall_s, row["wall_s"], row["time/learner_other"], row["time/learner_update"]) == (2.0, 2.0, 0.5, 0.5)
    assert {kind: part for kind, part in meter.shares()["learner"].items() if part} == {"other": 0.5, "update": 0.5}


def test_what_is_not_finite_is_null(meter: Meter, clock: Clock) -> None:
    ends = (math.inf, 3), (-math.inf, 4)
    meter.take(tick(chunk(1, *ends), metrics={"loss/value": math.nan, "loss/policy": torch.tensor(math.inf)}))
    clock.pass_by(1.0)
    broken = meter.row(ROWS, {"queue_util": math.nan}, np.float32(0.25))  # type: ignore[arg-type] # what buffers may hold
    assert [broken[key] for key in ("return_mean", "loss/value", "loss/policy", "queue_util")] == [None] * 4
    assert broken["length_mean"] == 3.5
    assert json.loads(json.dumps(broken, allow_nan=False))["buffer_util"] == 0.25


def test_all_that_the_collector_reports_is_kept(meter: Meter) -> None:
    told = {"queue_util": 0.5, "queue/fragments": 3.0, "another": None}
    assert meter.row(ROWS, told, 0.75).items() >= (told | {"buffer_util": 0.75}).items()


def test_rows_after_an_evaluation_carry_it_and_the_totals_keep_the_best(meter: Meter) -> None:
    meter.eval_result(200.0)
    assert row(meter)["eval_return"] == 200.0
    meter.eval_result(np.float32(150.0))  # type: ignore[arg-type] # a mean by numpy
    assert [row(meter)["eval_return"], row(meter)["eval_return"]] == [150.0, 150.0]
    meter.eval_result(math.nan)
    assert "eval_return" not in row(meter)


def test_spans_split_the_learner_time_and_inner_time_is_not_counted_twice(meter: Meter, clock: Clock) -> None:
    clock.pass_by(1.0)
    with meter.span("wait-data"):
        clock.pass_by(2.0)
        with meter.span("eval"):
            clock.pass_by(3.0)
            with meter.span("eval"):
                clock.pass_by(1.0)
        clock.pass_by(1.0)
    with meter.span("update"):
        clock.pass_by(4.0)
        closed = row(meter)  # within a span: the part before now counts
        clock.pass_by(4.0)
    assert closed["learner_busy"] == closed["time/learner_update"] == 4.0 / 12.0
    assert closed["time/learner_wait_data"] == 3.0 / 12.0
    spent = {kind: 16 * share for kind, share in meter.shares()["learner"].items() if share}
    assert spent == {"update": 8.0, "wait-data": 3.0, "eval": 4.0, "other": 1.0}


def test_time_begins_with_the_run(meter: Meter, clock: Clock) -> None:
    with meter.span("update"):
        clock.pass_by(5.0)
    meter.begin()
    assert meter.wall_s == 0
    with meter.span("fit"):
        clock.pass_by(3.0)
    assert row(meter)["time/learner_fit"] == 1
    assert meter.shares()["learner"]["fit"] == 1


def test_time_shares_are_those_of_the_interval(meter: Meter, clock: Clock) -> None:
    for kind in LEARNER_TIME:
        with meter.span(kind):
            clock.pass_by(2.0)
    closed = row(meter)
    assert closed["learner_busy"] == 10.0 / 20.0
    assert {closed[key] for key in EXTRA if key.startswith("time/learner_")} == {2.0 / 20.0}
    clock.pass_by(1.0)
    assert row(meter)["learner_busy"] == 0.0


def test_a_span_ends_with_its_block_whatever_happens(meter: Meter, clock: Clock) -> None:
    def fail() -> None:
        with meter.span("save"):
            clock.pass_by(1.0)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    clock.pass_by(3.0)
    assert meter.shares()["learner"]["save"] == 0.25
    with pytest.raises(KeyError):
        meter.span("tea")


def test_spans_are_cheap() -> None:
    def cost(block: AbstractContextManager[object]) -> float:
        took = []
        for _ in range(20):
            began = time.thread_time()
            for _ in range(1000):
                with block:
                    pass
            took.append(time.thread_time() - began)
        return min(took)

    assert cost(Meter(workers=1).span("update")) < 20 * cost(nullcontext())  # measured: 5 times


def test_env_busy_is_step_and_reset_of_all_worker_time(meter: Meter) -> None:
    meter.take(tick(chunk(1, step=30, reset=10, infer=40), chunk(1, wait_gate=20)))
    first = row(meter)
    assert (first["env_busy"], first["time/worker_step"], first["time/worker_wait_gate"]) == (0.4, 0.3, 0.2)
    meter.take(tick(chunk(1, step=1)))
    assert row(meter)["env_busy"] == 1.0


def test_worker_shares_are_of_all_workers_and_the_rest_is_other(meter: Meter, clock: Clock) -> None:
    second = 1_000_000_000
    meter.take(tick(chunk(1, step=3 * second, other=second)))
    row(meter)
    meter.take(tick(chunk(1, step=1 * second, wait_slot=2 * second)))
    clock.pass_by(5.0)  # two workers: 10 s
    shares = meter.shares()["worker"]
    assert tuple(shares) == WORKER_TIME
    assert {kind: share for kind, share in shares.items() if share} == {"step": 0.4, "wait-slot": 0.2, "other": 0.4}


def test_workers_that_report_more_than_the_wall_time_are_normalised(meter: Meter, clock: Clock) -> None:
    assert [share["other"] for share in meter.shares().values()] == [1.0, 1.0], "before any time has passed"
    meter.take(tick(chunk(1, step=3_000_000_000, infer=1_000_000_000)))
    clock.pass_by(1.0)
    assert {kind: share for kind, share in meter.shares()["worker"].items() if share} == {"step": 0.75, "infer": 0.25}


seconds = st.floats(0.0, 1e6)
nested = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(LEARNER_TIME), seconds), max_size=20)
nanoseconds = st.lists(st.lists(st.integers(0, 10**15), min_size=10, max_size=10), max_size=5)


@given(spans=nested, spent=nanoseconds, workers=st.integers(0, 64))
def test_shares_always_add_to_one(spans: list[tuple[int, str, float]], spent: list[list[int]], workers: int) -> None:
    clock = Clock()
    meter = Meter(workers, now=clock)
    for ns in spent:
        kinds = {kind.replace("-", "_"): amount for kind, amount in zip(WORKER_TIME, ns, strict=True)}
        meter.take(tick(chunk(1, **kinds)))
    for depth, kind, length in spans:
        inner = meter.span(LEARNER_TIME[depth])
        with meter.span(kind):
            clock.pass_by(length)
            with inner:
                clock.pass_by(length / 2)
        clock.pass_by(length / 3)
    for shares in meter.shares().values():
        assert math.fsum(shares.values()) == pytest.approx(1.0, abs=1e-12)
        assert all(0.0 <= share <= 1.0 for share in shares.values())


def test_totals(meter: Meter, clock: Clock) -> None:
    meter.take(tick(chunk(30, (1.0, 5), (2.0, 10)), metrics={"lag_mean": 1.0, "lag_max": 3}))
    clock.pass_by(1.0)
    row(meter)
    meter.take(tick(chunk(10)))
    clock.pass_by(3.0)
    assert (meter.wall_s, meter.episodes) == (4.0, 2)
    meter.end_training()
    with meter.span("eval"):
        clock.pass_by(4.0)
    assert meter.totals() == {
        "wall_s": 8.0, "training_s": 4.0, "env_steps": 40, "episodes": 2, "updates": 1,
        "steps_per_s": 5.0, "episodes_per_s": 0.25, "updates_per_s": 0.125,
        "return_mean": 1.5, "return_episodes": 2, "length_mean": 7.5, "first_step_s": 0.0, "lag_max": 3.0,
        "episodes_trained": {"count": 2, "length_mean": 7.5, "seconds_mean": 0.0},
    }  # fmt: skip


def test_the_first_step_is_told_by_the_author_that_was_through_last(meter: Meter, clock: Clock) -> None:
    assert meter.totals()["first_step_s"] is None
    clock.pass_by(10.0)
    meter.take(tick())
    meter.take(tick(chunk(8, step=2 * 10**9), chunk(8, step=5 * 10**9, infer=10**9, reset=3 * 10**9)))
    clock.pass_by(1.0)
    meter.take(tick(chunk(8, step=10**9)))
    assert meter.totals()["first_step_s"] == 4.0
    again = Meter(workers=2, now=clock)
    again.restore(meter.state())
    assert again.totals()["first_step_s"] == 4.0


def test_cpu_util_is_cpu_time_over_all_cores(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([10.0, 13.0, 12.0])
    monkeypatch.setattr(meter_module, "usage", lambda: Usage(next(used), 70.0, 25.0))
    monkeypatch.setattr(meter_module, "usable_cores", lambda: 4)
    meter = Meter(workers=1, now=clock)
    clock.pass_by(1.0)
    first = row(meter)
    assert (first["cpu_util"], first["memory/trainer_mb"], first["memory/workers_mb"]) == (0.75, 70.0, 25.0)
    clock.pass_by(1.0)
    assert row(meter)["cpu_util"] == 0.0  # a child's time ended with it: not negative


@pytest.mark.parametrize(
    ("budget", "progress"),
    [
        (Budget(), 0.0), (Budget(steps=1000), 0.25), (Budget(minutes=2.0), 0.5), (Budget(episodes=10), 0.7),
        (Budget(steps=1000, minutes=2.0, episodes=10), 0.7), (Budget(steps=100), 1.0), (Budget(steps=0), 1.0),
    ],
)  # fmt: skip
def test_progress_is_the_limit_that_comes_first(budget: Budget, progress: float) -> None:
    assert budget.progress(env_steps=250, wall_s=60.0, episodes=7) == progress


def test_a_measure_is_averaged_over_the_episodes_that_have_it(clock: Clock) -> None:
    """NaN means that a measure does not apply to an episode."""
    meter = Meter(workers=1, measures=("compliance", "never"), now=clock)
    for value in (1.0, math.nan, 0.5):
        ended = Episode(0, 0, 0, (), 0.0, 1, 0.0, (value, math.nan))
        meter.take(Tick([replace(chunk(1), episodes=(ended,))], 1, 0, None))
    row = meter.row(ROWS, {}, None)
    assert row["measure/compliance"] == 0.75
    assert row["measure/never"] is None


def test_children_count_while_they_run_and_their_time_after_they_ended() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    before = usage()
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        running = usage()
        child.communicate(b"\n", timeout=10)
    ended = usage()
    assert min(running.cpu_s, ended.cpu_s) - before.cpu_s >= 0.25
    assert before.trainer_mb > 50
    assert running.workers_mb - before.workers_mb > 4
    assert running.workers_mb > ended.workers_mb


def test_gpu_util_is_unknown_without_torch_or_cuda_and_a_share_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unknown(device: str) -> float:
        raise ModuleNotFoundError("pynvml")

    def known(device: str) -> float:
        asked.append(device)
        return 42

    def fake(initialised: bool, utilisation: object) -> float | None:
        module = ModuleType("torch")
        module.__dict__["cuda"] = SimpleNamespace(is_initialized=lambda: initialised, utilization=utilisation)
        monkeypatch.setitem(sys.modules, "torch", module)
        return gpu_util("cuda:1")

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert gpu_util("cuda:1") is None
    assert "torch" not in sys.modules
    assert [fake(False, known), fake(True, known), fake(True, unknown)] == [None, 0.42, None]
    assert asked == ["cuda:1"]


@pytest.mark.parametrize(
    ("gpus", "shown"),
    [
        ([], {"gpu_util": None}),
        (["cuda:1"], {"gpu_util": 0.1}),
        (["cuda:1", "cuda:0"], {"gpu_util": 0.1, "simulator_gpu_util": 0.0}),
    ],
)
def test_each_gpu_of_the_run_has_its_own_share(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, gpus: list[str], shown: dict[str, float | None]
) -> None:
    monkeypatch.setattr("freewheel.metrics.meter.gpu_util", lambda device: int(device[-1]) / 10)
    row = Meter(1, now=clock, gpus=gpus).row(ROWS, {}, None)
    assert {name: value for name, value in row.items() if "gpu" in name} == shown


def activity(meter: Meter, clock: Clock, kinds: Sequence[int]) -> list[dict[str, object]]:
    """Turns of a run, each of one kind; the rows that were closed."""
    rows = []
    for number, kind in enumerate(kinds):
        with meter.span("update" if kind % 2 else "wait-data"):
            clock.pass_by(0.25)
        ends = [(float(number), 3)] * (kind % 3)
        metrics = {"loss/policy": 0.1 * number, "lag_max": float(kind), "clip": 0.2, "alien": np.float32(number / 3)}
        meter.take(tick(chunk(7, *ends, step=1000), metrics=metrics if kind % 2 else None))
        meter.log("mine", number)
        if kind == 4:
            meter.eval_result(number, {"wins": 0.5})
        if kind == 5:
            rows.append(row(meter))
    return rows


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), max_size=12), st.integers(0, 12), st.integers(0, 10**6))
def test_a_meter_goes_on_from_its_state_as_if_no_time_had_passed(kinds: list[int], cut: int, away: int) -> None:
    one, other = Clock(), Clock()
    straight, first = Meter(2, ("wins",), one), Meter(2, ("wins",), other)
    expected = [*activity(straight, one, kinds[:cut]), *activity(straight, one, kinds[cut:]), row(straight)]
    found = activity(first, other, kinds[:cut])
    state = json.loads(json.dumps(first.state(), allow_nan=False))
    other.pass_by(away)
    second = Meter(2, ("wins",), other)
    other.pass_by(1.0)  # a start takes time, which is not the run's
    second.restore(state)
    found += [*activity(second, other, kinds[cut:]), row(second)]
    measured = dict.fromkeys(("cpu_util", "gpu_util", "memory/trainer_mb", "memory/workers_mb"))
    for ours, theirs in zip(found, expected, strict=True):
        assert list(ours) == list(theirs)
        assert ours | measured == theirs | measured
    assert (second.totals(), second.shares()) == (straight.totals(), straight.shares())


def test_the_state_of_a_meter_keeps_numbers_that_json_does_not_have(meter: Meter, clock: Clock) -> None:
    meter.take(tick(chunk(1, (math.inf, 3)), metrics={"loss/policy": math.nan, "lag_max": 3.0}))
    meter.log("mine", math.inf)
    state = json.loads(json.dumps(meter.state(), allow_nan=False))
    again = Meter(2, now=clock)
    again.restore(state)
    assert json.dumps(again.state()) == json.dumps(state)


def test_cpu_util_is_counted_from_the_restart_on(monkeypatch: pytest.MonkeyPatch, meter: Meter, clock: Clock) -> None:
    clock.pass_by(10.0)
    state = meter.state()
    monkeypatch.setattr(meter_module, "usage", lambda: Usage(clock.seconds, 0.0, 0.0))
    monkeypatch.setattr(meter_module, "usable_cores", lambda: 2)
    again = Meter(2, now=clock)
    again.restore(state)
    clock.pass_by(4.0)
    assert row(again)["cpu_util"] == 0.5
