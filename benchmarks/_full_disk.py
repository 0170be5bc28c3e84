"""`freewheel` on a disk that is full while the file named by FULL_DISK exists."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from freewheel.__main__ import main
from freewheel.files import disk

In = ParamSpec("In")
Out = TypeVar("Out")

FULL = Path(os.environ["FULL_DISK"])


def failing(call: Callable[In, Out]) -> Callable[In, Out]:
    def guarded(*args: In.args, **kwargs: In.kwargs) -> Out:
        if FULL.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(*args, **kwargs)

    return guarded


if __name__ == "__main__":
    for name in ("write", "append", "make_folder", "link", "point", "replace", "rename"):
        setattr(disk, name, failing(getattr(disk, name)))
    sys.exit(main())
