"""Matplotlib opens the files of its fonts before a test looks at what another leaves behind."""

from __future__ import annotations

from packages.lab.tests.plots.conftest import fonts

__all__ = ["fonts"]
