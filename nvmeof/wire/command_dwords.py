"""Records of the fields that a command has in its dwords 10 to 15."""

import struct
from typing import ClassVar, Final, Self

from nvmeof.wire.bit_fields import Record
from nvmeof.wire.sqe import Sqe

_DWORDS: Final = struct.Struct("<6I")


class CommandDwords(Record):
    """The bytes of its fields are counted from dword 10 on, which begins with byte 40 of the command."""

    __slots__ = ()
    BYTES: ClassVar[int] = _DWORDS.size

    def dwords(self) -> tuple[int, ...]:
        """All six."""
        return _DWORDS.unpack(self.encode())

    @classmethod
    def of(cls, sqe: Sqe, **more: bool) -> Self:
        dwords = (sqe.cdw10, sqe.cdw11, sqe.cdw12, sqe.cdw13, sqe.cdw14, sqe.cdw15)
        return cls.decode(_DWORDS.pack(*dwords), **more)
