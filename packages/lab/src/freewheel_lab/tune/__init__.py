"""`freewheel tune` measures an environment, predicts every setting, runs the best ones for real,
and writes a config file."""
