"""Environment adapters of the world families."""
