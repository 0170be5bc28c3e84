"""The checkpoints of a run: their files, the rows of replay buffers in segments, and when they are written."""
