"""Action heads: one file each, with everything about one distribution of actions."""
