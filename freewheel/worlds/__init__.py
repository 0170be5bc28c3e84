"""Worlds of our own, which registry.py makes known to Gymnasium."""
