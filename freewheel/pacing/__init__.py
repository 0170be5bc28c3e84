"""Decisions without processes, locks or shared memory: which worker may write how many rows with which version."""
