"""Policies: what a network is (spec), run by numpy in workers (actor) and by torch in learners (nets)."""
