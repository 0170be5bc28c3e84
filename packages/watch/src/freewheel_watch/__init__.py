"""This package reads run directories from outside. It provides `freewheel watch`, `runs` and
`timeline`."""
