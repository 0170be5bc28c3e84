"""Workflow-conditioned training and the search for the best workflow: an application on top, which nothing below imports."""
