"""This package runs trainings in separate processes and measures them, for comparisons and for
tuning."""
