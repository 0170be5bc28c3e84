"""Policies: what a network is (spec), how outputs become actions (heads), and the numpy and torch code."""
