"""How tests are spread over the processes of pytest-xdist: file by file, the file that takes longest first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

#: Seconds of every test file (`make test-durations`).
DURATIONS = Path(__file__).resolve().parents[1] / "durations.json"
#: Files whose tests have nothing in common, no fixture either: any process takes the next one.
APART = ("tests/test_benchmarks.py",)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest file first where several processes take files; else the order of the folders."""
    if hasattr(config, "workerinput") and DURATIONS.is_file():
        recorded: dict[str, dict[str, float]] = json.loads(DURATIONS.read_text(encoding="utf-8"))
        seconds = {path: sum(tiers.values()) for path, tiers in recorded.items()}
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        """A file goes to one process, which makes its fixtures once."""

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file in APART else file

    config.option.loadscopereorder = False  # the order of the items is kept
    return ByFile(config, log)
