"""Trainings on a real cluster of three Ray nodes that join, leave and are killed. `make test-cluster` runs them."""
