"""Evaluation during training: what plays the episodes, and when."""
