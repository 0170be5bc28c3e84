"""`freewheel compare`: every mode on the user's own environment, with equal work, and a recommendation."""
