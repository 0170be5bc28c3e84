"""Decisions, without processes, locks or memory: who may write how many rows, with which version, and who is late."""
