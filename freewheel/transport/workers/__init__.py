"""The common parts of supervised workers, for any wire: heartbeats, losses, progress, and states."""
