"""Advice: the properties of an environment, and the speed that every mode would reach with it here."""
