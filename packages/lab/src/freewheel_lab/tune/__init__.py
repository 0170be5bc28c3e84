"""`freewheel tune`: measures an environment, predicts every setting, runs the best for real and writes a config."""
