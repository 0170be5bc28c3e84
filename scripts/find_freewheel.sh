# Sourced by the scripts beside it: $freewheel is the command in .venv of this checkout, or else the one on PATH.
freewheel=$(dirname "$0")/../.venv/bin/freewheel
if [ ! -x "$freewheel" ]; then
  freewheel=$(command -v freewheel) || { echo "freewheel is neither in .venv nor on PATH: pip install it, or run make demo" >&2; exit 127; }
fi
