"""Workflow-conditioned training on CAGE 2, and the search for the best workflow."""
