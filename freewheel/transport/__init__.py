"""Wires between actors and learner: shared memory, CUDA streams, supervised worker processes, executors."""
