"""The timeline of a run: spans of workers and learner, recorded, drawn and exported."""
