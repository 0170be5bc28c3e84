"""The environment call in progress in this process, noted beforehand, so that a call that never returns can be named.

The thread of run/stopping/watchdog.py and a thread without Python (_watch.c) read the cells. Writing a cell takes about 30 ns.
"""

from __future__ import annotations

SINCE = 0  # monotonic ns when the present call began; 0: no environment is being called
PHASE = 1  # which kind of call it is
LANE = 2  # the lane that is being called; ALL if it is unknown
STEP = 3  # its step, counted from 1
BEAT = 4  # counts the checks of the watchdog's thread
SIGNAL = 5  # the first signal that has arrived
SIGNALS = 6  # the number of signals that have arrived
ENDING = 7  # ms that the watchdog's thread may take to end the run; 0: it is not ending the run
CODE = 8  # the exit code of a run that the watchdog's thread ends
LIMITS = 9  # ms that a call of each kind may take; 0: no limit
SEEDS = LIMITS + 4  # the seed of the episode of each lane

#: Kinds of calls. ELSEWHERE: other processes do the work, under their own limits.
CONSTRUCT, RESET, CALL, ELSEWHERE = range(4)
ALL = -1
LANES = 4096  # lanes whose seeds there is room for

cells = memoryview(bytearray(8 * (SEEDS + LANES))).cast("q")
