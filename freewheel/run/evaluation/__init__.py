"""Evaluation beside training: who plays the episodes, and when."""
