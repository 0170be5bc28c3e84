"""The checkpoints of a run: their files, replay-buffer rows in segments, and the schedule of saves."""
