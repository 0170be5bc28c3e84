#!/bin/sh
# The executor variant: a pool of workers that keep their environments and are never without an episode to play. That is how
# mode `episodes` works anyway, so this is run_async_training.sh by another name; with --wave the pool waits for whole batches.
set -e
exec "$(dirname "$0")/run_async_training.sh" "$@"
