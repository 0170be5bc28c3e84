#!/bin/sh
# Batch MBPO on the drone: 24 steps of every env, the next batch collected while this one is learned from.
# Every flag of `freewheel train` may follow, e.g.: scripts/run_async_mbpo_v2.sh --minutes 10 --device cuda
set -e
exec "$(dirname "$0")/../.venv/bin/freewheel" train freewheel/RoughDrone-v0 --preset isaac-batch --algo mbpo \
  --mbpo.batch 512 --mbpo.updates-per-row 0.25 --mbpo.rollouts-per-row 10 --mbpo.learning-starts 2000 --mbpo.max-epochs 50 --console classic "$@"
