"""Runs without the wait for a survey: the environment of a test is measured once, by the real one."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from freewheel.run import plan
from tests.support.worlds import Identity

REAL = plan.survey_env


@functools.cache
def measured() -> Any:
    from freewheel.config.resolve import from_options

    return REAL(from_options(Identity, {}))


def survey_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For runs of tests.support.worlds:Identity and envs with the same spaces."""
    monkeypatch.setattr(plan, "survey_env", lambda *_, **__: measured())
