"""A training run: its plan, trainer, checkpoints and end, and the code that reads a finished run."""
