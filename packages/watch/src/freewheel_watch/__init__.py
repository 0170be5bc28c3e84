"""Reads run directories from outside: `freewheel watch`, `runs` and `timeline`."""
