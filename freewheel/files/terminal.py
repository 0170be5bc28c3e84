"""A terminal that prints text of files, names and environments literally: control characters in it have no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from freewheel.errors import printable


class Terminal(Console):
    """A console without markup. Control characters in text, except line ends, are printed as escapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    @contextmanager
    def waiting(self) -> Iterator[Callable[[str], None]]:
        """Show progress in a slow block: the yielded function shows a text, in one place of a terminal or in lines."""
        with self.status("starting ...") as status:
            yield (lambda text: status.update(Text(text))) if self.is_terminal else self.print

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text, "\n"), segment.style)
