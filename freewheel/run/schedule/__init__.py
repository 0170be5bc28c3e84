"""Recorded schedules: what an asynchronous run did in which order, written down, and done again."""
