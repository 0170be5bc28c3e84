"""Training on Ray: `--mode ray` collects with actors of a cluster, and `train --federate` trains at sites that share no data."""
