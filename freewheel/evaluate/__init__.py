"""Evaluation: greedy episodes of a policy, and who plays them."""
