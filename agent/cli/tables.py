"""Tables for terminals of any width, and for pipes: text is broken, numbers never, and nothing is cut off.

rich cuts a word that is wider than its column and ends it in an ellipsis. A name that is cut is another
name, and a number that is cut is another number.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

_PIPE_COLUMNS = 1000
"""The width for a file or a pipe: a row is a line there, so that `grep` finds it whole."""


def folding_table(title: str, text: Sequence[str], numbers: Sequence[str] = (), head: bool = True) -> Table:
    """A table with the columns of `text`, which fold, and after them those of `numbers`, which do not."""
    table = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_header=head
    )
    for name in text:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, no_wrap=True, justify="right")
    return table


def table_console() -> Console:
    """Standard output, as wide as its terminal (or COLUMNS) is, and wide enough for any row elsewhere."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_PIPE_COLUMNS)


def print_tables(*shown: RenderableType) -> None:
    """Print tables and texts on standard output."""
    table_console().print(*shown, sep="\n")
