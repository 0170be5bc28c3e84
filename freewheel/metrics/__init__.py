"""Metrics: what a run counts and measures, and what every name means."""
