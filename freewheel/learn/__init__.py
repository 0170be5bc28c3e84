"""The learning algorithms, one package each, and the functions that they share."""
