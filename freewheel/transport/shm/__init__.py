"""The shared-memory wire between worker processes and the learner."""
