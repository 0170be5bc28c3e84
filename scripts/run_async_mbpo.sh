#!/bin/sh
# Continuous asynchronous MBPO (v1): collection, model fitting and agent updates each on its own clock; on our drone, or on --task.
# Every flag of `freewheel train` may follow, e.g.:
# scripts/run_async_mbpo.sh --task=Isaac-Exploration-Rough-Drone-v0 --num_envs=128 --num_collectors=8 --headless --device=cuda:0
# Where there is no GPU or no Isaac Lab, the CPU and our drone take their place, and a note says so.
set -e
. "$(dirname "$0")/find_freewheel.sh"
exec "$freewheel" train --preset async-mbpo "$@"
