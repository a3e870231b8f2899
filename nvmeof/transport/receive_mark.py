"""How much of a long payload has to be there before its receiver is woken (SO_RCVLOWAT, socket(7)).

TCP wakes a thread that sleeps in a receive for every few packets. Each wake-up costs the sender, whose
processor does it, and the receiver, who takes the little there is and sleeps again.

A mark must never exceed what is certain to come. A receive first takes what is there, and the kernel then
compares the mark with what comes behind it. A receive of `size` bytes sleeps with less than the mark taken,
so more than `size` less the mark are still to come. The mark is at most half the size, hence always reached.
MSG_WAITALL breaks this: such a receive sleeps with any part taken. The two are never used together.

The end of the stream, errors, time-outs and a full window wake a sleeper whatever the mark is.
"""

import socket
from contextlib import suppress
from typing import Final

LONG_BYTES: Final = 256 << 10
"""Receives of more than this have a mark. A shorter rest waits for all of itself."""

MOST_BYTES: Final = 512 << 10
"""Of a mark. The kernel enlarges the window for it, by itself to some MiB at the most (tcp_rmem)."""

NONE: Final = 1
"""What the kernel begins with: any byte wakes."""


class ReceiveMark:
    """Of one socket, for the thread that receives from it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.bytes = NONE

    def flags_for(self, size: int) -> int:
        """Set the mark for a receive of `size` bytes that are certain to come; the flags to receive with."""
        if size <= LONG_BYTES:
            if self.bytes != NONE:
                self.clear()
            return socket.MSG_WAITALL
        mark = min(size // 2, MOST_BYTES)
        if mark != self.bytes:
            self._set(mark)
        return 0

    def clear(self) -> None:
        """Any byte wakes from now on, as for a header or poll(2)."""
        if self.bytes != NONE:
            self._set(NONE)

    def _set(self, mark: int) -> None:
        with suppress(OSError):  # a dead socket, which wakes everybody
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
        self.bytes = mark
