"""Trainings on a real cluster of three Ray nodes, which are killed, leave and join: `make test-cluster`."""
