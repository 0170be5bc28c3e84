"""The metrics that a run counts and measures, and their descriptions."""
