"""The table of the README, made from the rows in benchmarks/results: python -m benchmarks.headlines writes it there."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks._common import RESULTS, ROOT, number, table

README = ROOT / "README.md"
BEGIN, END = "<!-- made by python -m benchmarks.headlines -->", "<!-- end -->"
Rows = Sequence[Mapping[str, Any]]


def rows(name: str) -> Rows:
    """All rows that a benchmark has kept."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def latest(name: str, **wanted: Any) -> Rows:
    """The rows of its latest call that has rows with these labels."""
    kept = rows(name)
    date = max(row["date"] for row in kept if all(row.get(key) == value for key, value in wanted.items()))
    return [row for row in kept if row["date"] == date]


def ratio_by_seed(part: Rows, who: str, figure: str) -> float:
    """The median over seeds of ours over theirs."""
    ours, theirs = (
        {row["seed"]: row[figure] for row in part if row[who] == name} for name in ("freewheel", "stable-baselines3")
    )
    return float(median(ours[seed] / theirs[seed] for seed in ours))


def of(part: Rows, figure: str, **wanted: Any) -> float:
    """The median of a figure over the rows with these labels."""
    return float(median(row[figure] for row in part if all(row.get(key) == value for key, value in wanted.items())))


def lines() -> Iterator[tuple[str, str, str]]:
    """What was done, how much faster, beside what."""
    sb3 = "stable-baselines3 2.9.2, same network and settings"
    ppo, sac = rows("versus_sb3"), rows("versus_sac")
    for task, name in ("cartpole", "CartPole-v1"), ("halfcheetah", "HalfCheetah-v5"):
        ratio = ratio_by_seed([row for row in ppo if row["task"] == task], "library", "steps_per_s")
        yield f"PPO on {name}, `lockstep`, env steps/s with learning", f"{ratio:.1f}×", sb3
    ratio = ratio_by_seed([row for row in sac if row["env"] == "HalfCheetah-v5"], "who", "updates_per_s")
    yield "SAC on HalfCheetah-v5, updates/s", f"{ratio:.1f}×", sb3
    sleeping = latest("straggler", way="lockstep")
    shares = {way: of(sleeping, "share", way=way) for way in ("free run", "continuous", "lockstep")}
    ratio, ceiling = shares["continuous"] / shares["lockstep"], shares["continuous"] / shares["free run"]
    beside = f"`lockstep`; {100 * ceiling:.0f} % of what they do without any framework"
    yield (
        "100 environments that sleep 10 ms a step, unevenly, on 2 cores, PPO learning, `continuous`",
        f"{ratio:.1f}×",
        beside,
    )
    uneven = [row for row in latest("first_day") if row["simulator"] == "uneven"]
    gain, mode = of(uneven, "gain"), uneven[-1]["mode"]
    yield (
        f"an uneven 5 ms simulator on 2 cores, `{mode}`, as `freewheel check` advises",
        f"{gain:.1f}×",
        "the default command",
    )
    fast = of(
        [{**row, "rate": median(row["episodes_per_s"])} for row in latest("cage2_rates")],
        "rate", red_agent="B_lineAgent", games=4096,
    )  # fmt: skip
    slow = of(latest("cyborg_rates"), "rows_per_s", way="sequential") / 100
    yield (
        "CAGE Challenge 2, our world on one core, episodes/s",
        f"{float(f'{fast / slow:.2g}'):,.0f}×",
        f"the official simulator ({number(slow)})",
    )
    device = rows("device_rsl")
    ratio = of(device, "steps_per_s", who="freewheel continuous") / of(device, "steps_per_s", who="rsl_rl")
    yield (
        "PPO on 4,096 drones, one H200, env steps/s with learning, `continuous`",
        f"{ratio:.1f}×",
        "rsl_rl 5.5.1, same simulation",
    )
    ablation = rows("device_ablation")
    best, base = (
        of(ablation, "updates_per_s", algo="mbpo", collect=collect, compile=how)
        for collect, how in (("async", "graphs"), ("sync", "off"))
    )
    yield "MBPO on Hopper-v5, one H200, updates/s", f"{best / base:.1f}×", "the same in turn, without CUDA graphs"


def headlines() -> str:
    return table(("what", "speed", "beside"), [list(line) for line in lines()])


def main() -> int:
    page = README.read_text(encoding="utf-8")
    made = re.sub(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", f"\n\n{headlines()}\n\n", page, flags=re.DOTALL)
    README.write_text(made, encoding="utf-8")
    print(headlines())
    return 0


if __name__ == "__main__":
    sys.exit(main())
