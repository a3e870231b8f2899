"""`pyverbs.dmabuf`: memory of other devices. Everything is refused."""

from __future__ import annotations

from emulator.roce.pyverbs.refused import Refused


class DmaBuf(Refused):
    """A dma-buf."""

    __slots__ = ()
