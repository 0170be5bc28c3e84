"""This package chooses the trainings of a comparison, decides how much work each does, and runs
them."""
