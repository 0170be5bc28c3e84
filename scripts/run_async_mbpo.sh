#!/bin/sh
# Continuous asynchronous MBPO on the drone: collection, model fitting and agent updates each on its own clock.
# Every flag of `freewheel train` may follow, e.g.: scripts/run_async_mbpo.sh --minutes 10 --device cuda
set -e
exec "$(dirname "$0")/../.venv/bin/freewheel" train freewheel/RoughDrone-v0 --preset isaac-64 --console classic "$@"
