"""Matplotlib opens its font files here, so that the check for leftovers of a test does not count them."""

from __future__ import annotations

from packages.lab.tests.plots.conftest import fonts

__all__ = ["fonts"]
