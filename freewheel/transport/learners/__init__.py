"""Learners that train together: their group, for sums and agreements, and its processes."""
