#!/bin/sh
# Batch MBPO (v2): 24 steps of every env, the next batch collected while this one is learned from; on our drone, or on --task.
# Every flag of `freewheel train` may follow, e.g.: scripts/run_async_mbpo_v2.sh --minutes 10 --device cuda
set -e
. "$(dirname "$0")/find_freewheel.sh"
exec "$freewheel" train --preset async-mbpo-v2 "$@"
