"""`freewheel watch`: a live page of runs, in a process of its own that only reads run directories."""
