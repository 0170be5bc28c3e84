"""A terminal on which nothing acts that a file, a name or an environment says: it is shown as it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from freewheel.errors import printable


class Terminal(Console):
    """Without markup; of all text that comes to it, only line ends and styles of our own reach the terminal as they are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    @contextmanager
    def waiting(self) -> Iterator[Callable[[str], None]]:
        """This block takes a while; what it is told is shown meanwhile: in one place of a terminal, else in lines."""
        with self.status("starting ...") as status:
            yield (lambda text: status.update(Text(text))) if self.is_terminal else self.print

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text, "\n"), segment.style)
