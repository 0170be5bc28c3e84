"""Collection: one file for each mode."""
