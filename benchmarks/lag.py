"""The bound on the lag, kept by pacing: laws and bounds, a learner that is too slow, and workers killed at the tightest bound."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks._common import Notebook, Row, number, rotated, straggler, table

NAME = "lag"
STEPS = 64  # of each env, an update
PATIENCE = 20.0  # mean steps, the default
EPOCHS = 10  # of the update that the others are scaled by
UPDATE_SHARE, SLOW_SHARE = 0.5, 1.5  # update time over the time to collect a batch
SLOW_WORKERS, SLOW_LAGS = 25, (1, 2)
LEAST_OF_CEILING = 0.95  # rows trained, of what the learner could take if it never waited
MOST_DROPPED = 1.5  # of the steps past their patience


@dataclass(frozen=True)
class Law:
    """A law of step times, and what is asked of throughput under it."""

    mean: float
    late: float  # share of the steps that are past their patience
    least: float  # of the free run, from max_lag 1 on


def lognormal_beyond(times: float, sigma: float = 0.7) -> float:
    """The share of lognormal steps that take longer than so many means."""
    return 0.5 * math.erfc((math.log(times) + sigma**2 / 2) / (sigma * math.sqrt(2)))


LAWS: Mapping[str, Law] = {
    "lognormal": Law(0.010, lognormal_beyond(PATIENCE), 0.97),
    "ninety_ten": Law(0.010, 0.0, 0.97),
    "rare": Law(0.010, 0.001, 0.95),  # 5 ms, and one step in a thousand takes 5 s
}


@dataclass(frozen=True)
class Size:
    """How long and how wide."""

    workers: int
    warm_s: float
    window_s: float
    rows: int
    probe_s: float
    probes: int


FULL, QUICK = Size(100, 8.0, 20.0, 1_000_000, 6.0, 2), Size(20, 0.5, 1.0, 0, 1.0, 0)


def paced(law: str, workers: int, max_lag: int, epochs: int) -> dict[str, Any]:
    """Options of a continuous run under a law."""
    world = {"law": law, "mean": LAWS[law].mean, "kind": "sleep"}
    ppo = {"epochs": epochs}
    return straggler("continuous", workers, world, {"num_steps_per_env": STEPS, "max_lag": max_lag, "ppo": ppo})


def epochs_for(notebook: Notebook, law: str, workers: int, share: float, size: Size) -> int:
    """As many epochs as make an update take this share of the time that its batch takes to collect."""
    epochs, wanted = EPOCHS, share * STEPS * LAWS[law].mean  # S rows are collected in S / (workers / mean)
    for _ in range(size.probes):  # twice, for a part of an update takes the same time whatever the epochs
        order = {"options": paced(law, workers, 2, epochs), "warm_s": size.warm_s / 2, "window_s": size.probe_s}
        row = notebook.once("_collect_once", order, {"form": "probe", "law": law, "epochs": epochs})
        epochs = max(1, round(epochs * wanted / float(row["update_s"])))
    return epochs


def cells_of(notebook: Notebook, law: str, lags: Sequence[int], size: Size) -> tuple[list[Row], float]:
    """A run for every bound, and the mean share of the free runs between them."""
    epochs = epochs_for(notebook, law, size.workers, UPDATE_SHARE, size)
    window = max(size.window_s, size.rows * LAWS[law].mean / size.workers)
    world = {"law": law, "mean": LAWS[law].mean, "kind": "sleep"}
    free: dict[str, Any] = {"workers": size.workers, "world": world, "warm_s": size.warm_s, "window_s": size.window_s}
    rows: list[Row] = []
    shares: list[float] = []
    for turn, max_lag in enumerate(lags):
        if turn % 2 == 0:
            shares.append(notebook.once("_free_run", free | {"seed": turn}, {"form": "free run", "law": law})["share"])
        order = {"options": paced(law, size.workers, max_lag, epochs), "warm_s": size.warm_s, "window_s": size.window_s}
        order |= {"window_rows": size.rows, "limit_s": 60 + 4 * (size.warm_s + window)}
        labels = {"form": "pace", "law": law, "max_lag": max_lag, "epochs": epochs}
        rows.append(notebook.once("_collect_once", order, labels))
    return rows, float(np.mean(shares))


def judge_pace(notebook: Notebook, law: str, rows: Sequence[Row], free: float) -> None:
    """One law: a table, and a verdict for every bound."""
    asked = LAWS[law]
    notebook.write(f"## {law}, mean step {1e3 * asked.mean:g} ms, {rows[0]['workers']} workers: free run {free:.3f}")
    lines = [line(row, row["share"] / free) for row in rows]
    notebook.write(table(("max_lag", *COLUMNS, "of the free run"), lines))
    for row in rows:
        what = f"{law}, max_lag {row['max_lag']}"
        notebook.judge(f"{what}: lag at most {row['lag_max']:g}", row["lag_max"] <= row["max_lag"], exact=True)
        others = sorted(set(row["dropped"]) - {"stale"})
        notebook.judge(f"{what}: dropped {row['dropped'] or 0}, as stale only", not others, exact=True)
        expected = asked.late * row["produced"]
        most = math.floor(MOST_DROPPED * expected + 3 * math.sqrt(expected))  # and the noise of counting
        dropped = row["dropped"].get("stale", 0)
        notebook.judge(f"{what}: {dropped} rows dropped, at most {most} ({expected:.0f} expected)", dropped <= most)
        if row["max_lag"] >= 1:
            ratio = row["share"] / free
            notebook.judge(f"{what}: {ratio:.3f} of the free run, at least {asked.least}", ratio >= asked.least)


COLUMNS = ("rows", "share of the ideal", "U ms", "C ms", "lag max", "dropped", "wait for credit", "learner busy")


def line(row: Row, ratio: float) -> list[str]:
    collection = row["rows_per_update"] / row["rows_per_s"]
    return [
        str(row["max_lag"]),
        f"{row['rows']:,}",
        f"{row['share']:.3f}",
        number(1e3 * row["update_s"]) if row["update_s"] else "-",
        number(1e3 * collection),
        number(row["lag_max"]),
        " ".join(f"{cause} {count}" for cause, count in row["dropped"].items()) or "0",
        f"{100 * row['worker_time']['wait-credit']:.1f} %",
        f"{100 * row['learner_busy']:.0f} %",
        f"{ratio:.3f}",
    ]


def slow_learner(notebook: Notebook, size: Size, quick: bool) -> list[Row]:
    """Updates that take longer than collecting: the learner must never wait, and the bound must hold."""
    epochs = epochs_for(notebook, "lognormal", SLOW_WORKERS, SLOW_SHARE, size)
    rows: list[Row] = []
    for max_lag in SLOW_LAGS[: 1 if quick else None]:
        order = {"options": paced("lognormal", SLOW_WORKERS, max_lag, epochs), "warm_s": size.warm_s}
        labels = {"form": "slow learner", "max_lag": max_lag, "epochs": epochs}
        rows.append(notebook.once("_collect_once", order | {"window_s": 3.0 if quick else 60.0}, labels))
    ratios = [row["trained_per_s"] * (row["update_s"] or math.inf) / row["rows_per_update"] for row in rows]
    notebook.write(f"## slow learner: {SLOW_WORKERS} workers, lognormal, {epochs} epochs")
    lines = [line(row, ratio) for row, ratio in zip(rows, ratios, strict=True)]
    notebook.write(table(("max_lag", *COLUMNS, "trained, of S / U"), lines))
    for row, ratio in zip(rows, ratios, strict=True):
        what = f"slow learner, max_lag {row['max_lag']}"
        text = f"{what}: trains {ratio:.3f} of S / U, at least {LEAST_OF_CEILING}"
        notebook.judge(text, ratio >= LEAST_OF_CEILING)
        notebook.judge(f"{what}: lag at most {row['lag_max']:g}", row["lag_max"] <= row["max_lag"], exact=True)
    return rows


def killed(notebook: Notebook, seconds: float) -> Row:
    """The tightest bound, a grant that is no multiple of a fragment, and a worker killed every half second."""
    options = {"num_steps_per_env": 50, "collection_batch_size": 16, "max_lag": 0}
    world = {"law": "lognormal", "mean": 0.005, "kind": "sleep"}
    victims = np.random.default_rng(0).integers(8, size=int(seconds / 0.5)).tolist()
    order = {"options": straggler("continuous", 8, world, options), "warm_s": 1.0, "window_s": seconds + 3.0}
    order["kills"] = [(0.5 * number, victim) for number, victim in enumerate(victims, start=1)]
    row = notebook.once("_collect_once", order, {"form": "killed", "max_lag": 0})
    notebook.write("## workers killed at max_lag 0")
    text = f"{row['kills']} kills, {row['restarts']} restarts, {row['updates_after_kills']} updates after the last"
    notebook.judge(f"{text}: training goes on", row["updates_after_kills"] > 0 and not row["stalled"], exact=True)
    notebook.judge(f"killed: lag at most {row['lag_max']:g}", row["lag_max"] <= 0, exact=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--forms", nargs="+", choices=("pace", "slow", "killed"), default=["pace", "slow", "killed"])
    parser.add_argument("--rows", type=int, default=FULL.rows, help="of each law and bound, at least")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    size = QUICK if given.quick else replace(FULL, rows=given.rows)
    if given.quick:
        given.laws, given.lags = given.laws[:1], given.lags[:3:2]
    notebook, rows = Notebook(NAME, "Lag, bounded by pacing", quick=given.quick), list[Row]()
    for turn, law in enumerate(given.laws if "pace" in given.forms else ()):
        paced_rows, free = cells_of(notebook, law, rotated(given.lags, turn), size)
        judge_pace(notebook, law, sorted(paced_rows, key=lambda row: int(row["max_lag"])), free)
        rows += paced_rows
    if "slow" in given.forms:
        rows += slow_learner(notebook, size, given.quick)
    if "killed" in given.forms:
        rows.append(killed(notebook, 1.0 if given.quick else 10.0))
    notebook.judge_promises(rows)
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
