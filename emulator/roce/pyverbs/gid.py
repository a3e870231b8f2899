"""GIDs. Part of `pyverbs.addr`."""

from __future__ import annotations

from typing import Final

from emulator.roce.pyverbs.base import PyverbsObject
from emulator.roce.pyverbs.utils import gid_bytes

NO_GID: Final = bytes(16)


class GID(PyverbsObject):
    """Sixteen bytes, shown as eight groups of four digits."""

    __slots__ = ("raw",)

    def __init__(self, val: str | None = None) -> None:
        self.raw = NO_GID if val is None else gid_bytes(val)

    @property
    def gid(self) -> str:
        """The text; setting it takes the same form."""
        return str(self)

    @gid.setter
    def gid(self, val: str) -> None:
        self._set_gid(val)

    def _set_gid(self, val: str) -> None:
        self.raw = gid_bytes(val)

    def __str__(self) -> str:
        return self.raw.hex(":", 2)
