"""Tables for terminals of any width: text is broken, numbers never, and nothing is cut off.

rich cuts a word that is wider than its column and ends it in an ellipsis. A name that is cut is another
name, and a number that is cut is another number.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table


def folding_table(title: str, text: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """A table with the columns of `text`, which fold, and after them those of `numbers`, which do not."""
    table = Table(title=title or None, title_justify="left")
    for name in text:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, no_wrap=True, justify="right")
    return table
