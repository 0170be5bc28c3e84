"""Another engine: `--mode ray`, actors on a Ray cluster, and `train --federate`, sites that share no data."""
