"""Adapters: one file a family of worlds."""
