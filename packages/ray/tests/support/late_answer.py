"""`python -m packages.ray.tests.support.late_answer PID FD`: a process that is connected to its parent. When it is asked to end,
it still answers, and then takes some time to write a file."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from freewheel.transport import command

SECONDS = 1.0  # time between the answer and the end
ASKED, ENDED = Path("asked"), Path("ended")  # in the working directory


def main(descriptor: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # must happen before the first question is read
    with command.line_to_parent(descriptor) as line:
        line.recv_bytes()
        ASKED.touch()
        signal.sigwait([signal.SIGTERM])
        line.send_bytes(b"an answer")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # another signal ends the process at once
        time.sleep(SECONDS)
        ENDED.touch()


if __name__ == "__main__":
    command.end_with(int(sys.argv[1]))
    main(sys.argv[2])
