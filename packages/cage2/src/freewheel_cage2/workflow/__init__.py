"""Training on CAGE 2 under a given workflow, and the search for the best workflow."""
