"""The replay buffer: packed rows in a ring, which of them are drawn, and returns over several steps."""
