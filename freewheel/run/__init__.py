"""A training run: the plan, the trainer, checkpoints, stopping, and a finished run read back."""
