"""What every test of a run gets: environments that are measured once in a session of tests."""

from __future__ import annotations

import pytest

from tests.support.surveys import survey_each_once


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    survey_each_once(monkeypatch)
