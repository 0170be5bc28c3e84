"""Federated averaging: several sites that share no data train, each for itself; only what they have learned travels."""
