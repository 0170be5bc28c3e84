"""Where a run is written to: one file = one Sink."""
