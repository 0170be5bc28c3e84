"""Runs a command beside a program that takes cores away: `python scripts/beside_load.py 1.5 make test`."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time

PERIOD = 0.05  # seconds over which a part of a core is burnt


def burn(share: float) -> None:
    """Keep so much of a core busy, for ever."""
    while True:
        end = time.perf_counter() + share * PERIOD
        while time.perf_counter() < end:
            pass
        time.sleep((1.0 - share) * PERIOD)


def main() -> int:
    cores, command = float(sys.argv[1]), sys.argv[2:]
    shares = [1.0] * int(cores) + [cores % 1.0] * (cores % 1.0 > 0)
    burners = [multiprocessing.Process(target=burn, args=(share,), daemon=True) for share in shares]
    for burner in burners:
        burner.start()
    began = time.monotonic()
    try:
        code = subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        code = 130
    finally:
        for burner in burners:
            burner.kill()
    print(f"beside {cores:g} busy cores: exit code {code} after {time.monotonic() - began:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
