"""Measured trainings: the same work in processes of their own, for comparisons and for tuning."""
