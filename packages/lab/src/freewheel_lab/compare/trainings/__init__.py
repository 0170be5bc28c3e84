"""The trainings of a comparison: which ones, how much work each does, and running them."""
