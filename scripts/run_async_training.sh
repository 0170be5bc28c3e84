#!/bin/sh
# Workflow search on CAGE 2 from asynchronous episodes: workers play whole ones on their own, and they are taken as they end.
# Every flag of `freewheel workflow search` and `freewheel train` may follow, e.g.:
# scripts/run_async_training.sh --n-envs 100 --total-episodes 1000 --episodes-per-update 100 --red-agent B_lineAgent
# and for the real simulator: scripts/run_async_training.sh cyborg:Scenario2 --n-workers 2 --total-episodes 20000
set -e
. "$(dirname "$0")/find_freewheel.sh"
exec "$freewheel" workflow search --mode episodes --console classic --substitute "$@"
