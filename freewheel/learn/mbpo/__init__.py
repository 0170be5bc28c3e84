"""Model-based policy optimisation."""
