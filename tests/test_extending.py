"""docs/extending.md and examples/td3, used as a person would: as packages of their own, found by their entry points."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.places import LONG, ROOT
from tests.support.runs import python

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python\n# my_freewheel/(\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
TD3 = ROOT / "examples" / "td3"


def install(folder: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """What an installer leaves behind: a package's entry points, where Python looks for them."""
    about = folder / f"{name}-0.1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    parts = {group: "".join(f"{key} = {value}\n" for key, value in own.items()) for group, own in groups.items()}
    (about / "entry_points.txt").write_text("\n".join(f"[{group}]\n{part}" for group, part in parts.items()))


def freewheel(folder: Path, *argv: str) -> str:
    """The output of a command, from another directory, with the packages of this folder installed."""
    done = python("-m", "freewheel", *argv, cwd=folder, PYTHONPATH=os.pathsep.join([str(folder), str(TD3), str(ROOT)]))
    assert done.stderr == ""
    return done.stdout


def test_each_example_is_whole_and_short() -> None:
    assert sorted(EXAMPLES) == ["best.py", "csv_sink.py", "grid.py", "grouped.py", "reinforce.py"]
    assert max(len(code.strip().splitlines()) for code in EXAMPLES.values()) < 60


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_page_works_as_it_stands(tmp_path: Path) -> None:
    package = tmp_path / "my_freewheel"
    package.mkdir()
    for name, code in EXAMPLES.items():
        (package / name).write_text(code)
    table = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert table is not None
    install(tmp_path, "my_freewheel", tomllib.loads(table[1])["project"]["entry-points"])
    shown = freewheel(tmp_path, "train", "--algo", "reinforce", "--mode", "grouped", "--help")
    assert all(flag in shown for flag in ("--reinforce.lr", "--group", "--max-lag"))
    freewheel(
        tmp_path, "train", "grid:4", "--algo", "reinforce", "--mode", "grouped", "--workers", "2", "--num-envs", "4",
        "--sinks", "csv", "--steps", "12000", "--slip", "0.05", "--run", "corridor",
    )  # fmt: skip
    run = tmp_path / "runs" / "corridor"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["best_eval"] > -0.6, "three steps to the right are -0.3"
    assert summary["lag_max"] <= 1
    assert (run / "metrics.csv").read_text().startswith("wall_s,env_steps,updates,return_mean,lag_max")
    assert "corridor" in freewheel(tmp_path, "best")
    assert "list runs, the best first" in freewheel(tmp_path, "--help")


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["continuous", *["batch"] * LONG])
def test_td3_as_a_package_of_its_own_learns_pendulum(tmp_path: Path, mode: str) -> None:
    install(tmp_path, "freewheel_td3", tomllib.loads((TD3 / "pyproject.toml").read_text())["project"]["entry-points"])
    freewheel(
        tmp_path, "train", "Pendulum-v1", "--algo", "td3", "--mode", mode, "--workers", "1", "--num-envs", "1",
        "--steps", "9000", "--td3.learning-starts", "500", "--td3.lr", "1e-3", "--seed", "1", "--run", "pendulum",
        "--evals", "9", "--eval-episodes", "5",
    )  # fmt: skip
    summary = json.loads((tmp_path / "runs" / "pendulum" / "summary.json").read_text())
    assert summary["best_eval"] > -500, "doing nothing is about -1200"
    assert "greedy" in freewheel(tmp_path, "eval", "pendulum", "--episodes", "5")
