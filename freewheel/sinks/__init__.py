"""Destinations of a run's output: one sink per file."""
