"""Measures trainings from outside: `freewheel compare`, `tune` and `plot`, and `train --seeds`."""
