"""Policies: what a network is (spec), how outputs become actions (heads), and the code that runs it, in numpy and torch."""
