"""The tables of packages/ray/docs/cluster.md, made from the newest rows in benchmarks/results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks._cluster_worlds import WORLDS
from benchmarks._common import RESULTS, ROOT, Row, median, number, spread, table

PAGE = ROOT / "packages" / "ray" / "docs" / "cluster.md"
END = "<!-- end -->"


def newest(name: str, folder: Path = RESULTS) -> list[Row]:
    """The rows of the last call of a benchmark."""
    path = folder / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    if not rows:
        raise SystemExit(f"nothing was measured yet: python -m benchmarks.{name}")
    last = max(row["date"] for row in rows)
    return [row for row in rows if row["date"] == last]


def of(rows: Sequence[Row], /, **labels: object) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in labels.items())]


def size(count: float) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e6 else f"{count / 1e3:.3g} kB"


def ms(rows: Sequence[Row], key: str) -> str:
    return number(1e3 * median(rows, key))


# ------------------------------------------------------------------------------------------------------------ the tables


def calls() -> str:
    rows, lines = of(newest("ray_costs"), kind="call"), []
    for count in sorted({row["bytes"] for row in rows}):
        near, far = (of(rows, bytes=count, nodes=nodes) for nodes in (1, 2))
        way = "with the answer" if near[0]["inline"] else "object store"
        figures = [ms(part, key) for part in (near, far) for key in ("latency_s", "idle_s", "driver_s", "raylet_s")]
        lines.append([size(count), way, *figures])
    one = ("until the rows are here, ms", "actor idle", "driver CPU", "raylet CPU")
    return table(("fragment", "travels", *one, *(f"{name}, two nodes" for name in one)), lines)


def weights() -> str:
    rows, lines = of(newest("ray_costs"), kind="weights"), []
    for count in sorted({row["bytes"] for row in rows}):
        near, far = (of(rows, bytes=count, nodes=nodes) for nodes in (1, 2))
        figures = [ms(near, "put_s"), ms(near, "next_read_s"), ms(far, "first_read_s"), ms(far, "next_read_s")]
        lines.append([size(count), *figures])
    header = ("weights", "put, ms", "read on the driver's node", "first read on another node", "further reads there")
    return table(header, lines)


def fragments() -> str:
    from benchmarks.ray_costs import fragment_table

    return fragment_table(newest("ray_costs"))


def travels() -> str:
    from benchmarks.ray_costs import bytes_table

    return bytes_table(newest("ray_costs"))


def straggler() -> str:
    rows = newest("ray_straggler")
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        part = of(rows, way=way)
        used = [
            float(np.median([row.get(key, 0.0) / row["window_s"] for row in part]))
            for key in ("worker_cpu_s", "learner_cpu_s")
        ]
        lines.append(
            [way, spread([row["share"] for row in part]), number(median(part, "rows_per_s")), f"{sum(used):.2f}"]
        )
    return table(("way", "share of the ideal", "env steps/s", "cores used"), lines)


def cyborg() -> str:
    rows, lines = newest("ray_cyborg"), []
    beside = of(rows, way="episodes")
    for way in dict.fromkeys(row["way"] for row in rows):
        part = of(rows, way=way)
        ratios = [ours["rows_per_s"] / other["rows_per_s"] for ours, other in zip(part, beside, strict=True)]
        lines.append([way, spread([row["rows_per_s"] for row in part]), spread(ratios)])
    return table(("way", "env steps/s", "of mode episodes"), lines)


def model(learner: str) -> str:
    """A cell: env steps/s, their share of the ideal, what limits them; and the change that makes the most."""
    from benchmarks.cluster_model import AS_IT_IS, CHANGES, SAME, WORTH

    rows, lines = of(newest("cluster_model"), learner=learner), []
    for workers, nodes in dict.fromkeys((row["workers"], row["nodes"]) for row in rows):
        line = [f"{workers:,} on {nodes}"]
        for world in WORLDS:
            part = of(rows, world=world, workers=workers)
            (usual,) = of(part, way=AS_IT_IS)
            text = f"{rounded(usual['rate'])} ({usual['share']:.2f}), {usual['limit']}"
            most = max(row["rate"] for row in part)
            best = next(row for way in CHANGES for row in of(part, way=way) if row["rate"] >= most / SAME)
            if best["rate"] >= WORTH * usual["rate"]:
                text += f"; {best['way']}: {rounded(best['rate'])}"
            line.append(text)
        lines.append(line)
    return table(("workers on nodes", *(f"{name}: {env.about}" for name, env in WORLDS.items())), lines)


def rounded(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}"


PARTS: Mapping[str, tuple[str, Callable[[], str]]] = {  # what it is made from, and how
    "calls": ("ray_costs", calls),
    "weights": ("ray_costs", weights),
    "fragments": ("ray_costs", fragments),
    "travels": ("ray_costs", travels),
    "straggler": ("ray_straggler", straggler),
    "cyborg": ("ray_cyborg", cyborg),
    "ppo": ("cluster_model", lambda: model("PPO on a CPU core")),
    "wire": ("cluster_model", lambda: model("learning costs nothing")),
}


def filled(page: str) -> str:
    """The page with the tables of what has been measured."""
    for name, (source, make) in PARTS.items():
        if (RESULTS / f"{source}.jsonl").exists():
            begin = re.escape(f"<!-- table {name} -->")
            made = make().replace("\\", "\\\\")
            page = re.sub(f"(?<={begin}).*?(?={re.escape(END)})", f"\n\n{made}\n\n", page, flags=re.DOTALL)
    return page


def write() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
