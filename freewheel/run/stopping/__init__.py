"""How a run ends: signals and the time limit, exits of user code, the watchdog, and the parts of the end."""
