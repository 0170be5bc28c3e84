"""Collection: one file is one mode is one Collector."""
