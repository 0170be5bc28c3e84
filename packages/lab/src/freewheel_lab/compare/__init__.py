"""`freewheel compare` trains in every mode on the user's own environment with equal work, and
recommends a mode."""
