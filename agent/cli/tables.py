"""Tables for terminals of any width, and for pipes: text folds, numbers never break, and nothing is cut off.

rich cuts a word that is wider than its column and ends it in an ellipsis. A name that is cut is another
name, and a number that is cut is another number.
"""

import itertools
import os
import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress import Progress
from rich.table import Column, Table
from rich.text import Text

_PIPE_COLUMNS = 1000
"""The width for a file or a pipe: a row is a line there, so that `grep` finds it whole."""
NOTE_COLUMNS = 80
_WORD_MAX = 32
"""Words up to this stand in one piece: an NGUID has 32 characters."""


class FoldingTable(Table):
    """A table whose text columns hold their longest word; on a terminal too narrow for it, one space
    between columns, and on one too narrow for that, a block a row."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - 3 * (len(self.columns) - 1)
        unlimited = options.update_width(_PIPE_COLUMNS)
        most = []
        for column in self.columns:
            cells = [console.measure(cell, options=unlimited) for cell in (column.header, *column.cells)]
            most.append(max(cell.maximum for cell in cells))
            word = max(cell.minimum for cell in cells)
            column.width = most[-1] if column.no_wrap else min(word, _WORD_MAX)
            room -= column.width
        if room < 0:
            # A gap of one space still keeps numbers of several rows below each other; blocks do not.
            room += 2 * (len(self.columns) - 1)
            self.padding = 0
        if room < 0:
            yield from self._blocks(console)
            return
        for _ in range(room):
            narrow = [column for column, end in zip(self.columns, most, strict=True) if _width(column) < end]
            if not narrow:
                break
            narrowest = min(narrow, key=_width)
            narrowest.width = _width(narrowest) + 1
        yield from super().__rich_console__(console, options)
        yield Text()

    def _blocks(self, console: Console) -> RenderResult:
        """A block for each row: its name in a line, and a line for each other cell."""
        if self.title:
            yield Text(str(self.title), "italic", overflow="fold")
        first = 1 + sum(1 for _ in itertools.takewhile(lambda column: not column.header, self.columns))
        for row in zip(*(column.cells for column in self.columns), strict=True):
            cells = [cell if isinstance(cell, Text) else console.render_str(str(cell)) for cell in row]
            yield Text(" ", overflow="fold").join(cells[:first])
            for column, cell in zip(self.columns[first:], cells[first:], strict=True):
                if cell:
                    yield Padding(Text(f"{column.header}: ", overflow="fold").append_text(cell), (0, 0, 0, 2))
        yield Text()


def _width(column: Column) -> int:
    return column.width or 0


def folding_table(title: str, text: Sequence[str], numbers: Sequence[str] = (), head: bool = True) -> Table:
    """A table with the columns of `text`, which fold, and after them those of `numbers`, which do not."""
    table = FoldingTable(
        title=Text(title, "table.title") if title else None,  # a name in it is no markup
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,  # of this box they are an empty line before and after
        show_header=head,
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


def progress_bar() -> Progress:
    """A bar on the terminal of standard error, gone at its end; elsewhere nothing, not even an empty line."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def print_tables(*shown: RenderableType) -> None:
    table_console().print(*shown, sep="\n")


def print_facts(title: str, rows: Iterable[tuple[str, str]], *more: Table, notes: Iterable[str]) -> None:
    """A table of what and how much, further ones, and sentences below them."""
    facts = folding_table(title, ("",), ("",), head=False)
    for row in rows:
        facts.add_row(*row)
    print_tables(facts, *more)
    for note in notes:
        print(textwrap.fill(note, NOTE_COLUMNS))
