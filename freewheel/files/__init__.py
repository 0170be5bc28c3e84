"""Files of a run: how they are written and read, so that a fault of the disk or a hostile file never ends a training."""
