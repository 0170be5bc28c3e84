"""Several learners of one run, in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.runs import assert_balanced, rows_of, train


def test_two_learners_train_one_run(tmp_path: Path) -> None:
    result = train(tmp_path, learners=2)
    summary = result.summary
    assert (summary["ended"], summary["exit_code"], summary["env_steps"], summary["trained"]) == ("steps", 0, 640, 640)
    assert_balanced(summary)
    assert [one["env_steps"] for one in summary["learners"]] == [320, 320]
    assert [one["trained"] for one in summary["learners"]] == [320, 320]
    assert summary["episodes"] == 40
    for row in rows_of(result):
        assert_balanced(row)
    config = json.loads((result.path / "config.json").read_text())
    assert (config["learners"], config["num_envs"]) == (2, 4), "options describe the whole run"
    assert json.loads((result.path / "learners/1/summary.json").read_text())["env_steps"] == 320
