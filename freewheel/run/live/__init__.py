"""What others see of a run while it trains: its status, its newest rows, and which runs there are."""
