"""Processes: shared memory, weights, credits, supervised workers. Only this room and collect/ know that there are any."""
