"""`pyverbs.dmabuf`: memory of other devices. It is refused."""

from emulator.roce.pyverbs.base import not_here


class DmaBuf:
    """A dma-buf: refused with EOPNOTSUPP."""

    __slots__ = ()

    def __init__(self, size: int, gpu: int = 0, gtt: int = 0) -> None:
        raise not_here("DmaBuf")
