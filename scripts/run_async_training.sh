#!/bin/sh
# Workflow search on CAGE 2 from asynchronous episodes: workers play whole ones on their own, and they are taken as they end.
# Every flag of `freewheel workflow search` and `freewheel train` may follow, e.g. for the real simulator:
# scripts/run_async_training.sh cyborg:Scenario2 --n-workers 8 --total-episodes 20000 --episodes-per-update 100
set -e
exec "$(dirname "$0")/../.venv/bin/freewheel" workflow search --mode episodes "$@"
