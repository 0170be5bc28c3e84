"""The view of a run from outside while it trains: its status and its newest rows. It also holds adaptive control."""
