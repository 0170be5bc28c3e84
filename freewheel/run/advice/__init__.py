"""Advice: what an environment is like, and what every mode would make of it here."""
