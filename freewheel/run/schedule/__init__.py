"""Recorded schedules: the order of events in an asynchronous run, written to a file and replayed."""
