"""Where a range of a value that is being read comes from (get.py)."""

from __future__ import annotations

from agent.pool.steps import Pending


class Source:
    """Where the sealed bytes of a range come from: a buffer, and the read that fills it, if any.

    What was prestaged needs no read: `pending` is None.
    """

    __slots__ = ("data", "data_starts_at", "header", "header_pending", "pending", "with_room")

    def __init__(
        self,
        header: memoryview | None,
        data: memoryview,
        pending: Pending | None,
        header_pending: Pending | None = None,
        data_starts_at: int = 0,
        with_room: memoryview | None = None,
    ) -> None:
        self.header = header
        self.data = data
        self.pending = pending
        self.header_pending = header_pending
        self.data_starts_at = data_starts_at
        """How many bytes of `pending` come before `data`: the header, where both are one read."""
        self.with_room = with_room
        """`data`, of one unit, and behind it the room that opening it by one call takes."""
