"""What all supervised workers have in common, whatever wire carries their rows: heartbeats, losses, progress, and states."""
