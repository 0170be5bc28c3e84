"""Writes and reads the files of a run, so that a fault of the disk or a hostile file never ends a training."""
