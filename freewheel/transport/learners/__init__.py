"""Learners that train together: their group, which adds up and agrees, and the processes of it."""
