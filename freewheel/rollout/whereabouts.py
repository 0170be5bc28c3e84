"""Where the environments of this process are: written down before each call, so that one that never returns can be named.

The memory is read by the thread of run/watchdog.py and by one without Python (_watch.c). Writing a cell takes some 30 ns.
"""

from __future__ import annotations

SINCE = 0  # monotonic ns when the present call began; 0: no environment is being called
PHASE = 1  # which kind of call it is
LANE = 2  # the lane that is being called; ALL if they cannot be told apart
STEP = 3  # its step, counted from 1
BEAT = 4  # counts the looks of the watchdog's thread
SIGNAL = 5  # the first signal that has come, ...
SIGNALS = 6  # ... and how many have
ENDING = 7  # ms that the watchdog's thread has to end the run, once it has begun to
CODE = 8  # the exit code then
LIMITS = 9  # ms that a call of each kind may take; 0: any time
SEEDS = LIMITS + 4  # the seed of the episode of each lane

#: Kinds of calls; the last: processes do the work, and have limits of their own.
CONSTRUCT, RESET, CALL, ELSEWHERE = range(4)
ALL = -1
LANES = 4096  # whose seeds there is room for

cells = memoryview(bytearray(8 * (SEEDS + LANES))).cast("q")
