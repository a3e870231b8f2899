"""Records of a fixed layout, big-endian: each field says in its annotation which bits are its own.

    local_id: Annotated[int, Bits(0, 32)]            bytes 0 to 3
    service_timeout: Annotated[int, Bits(9, 5)]      bits 7 to 3 of byte 9
    srq: Annotated[bool, Flag(27, 4)]                bit 4 of byte 27

Bits that no field has are reserved: zero when sent, not looked at when received.
"""

from typing import Any, Generic, TypeVar, get_type_hints

_Record = TypeVar("_Record")


class Bits:
    """A number of `width` bits, the highest of which is bit `first` of byte `byte`."""

    def __init__(self, byte: int, width: int, first: int = 7) -> None:
        self.width = width
        self.end = 8 * byte + 7 - first + width
        """Bits of the record up to the end of the field."""

    def number(self, value: Any) -> int:
        """The value as a number. ValueError where it has too many bits: a neighbour would be changed."""
        if not 0 <= value < 1 << self.width:
            raise ValueError(f"{value:#x} does not fit into {self.width} bits")
        return int(value)

    def put(self, value: Any, bits: int) -> int:
        """The value in its place in a record of so many bits."""
        return self.number(value) << bits - self.end

    def take(self, record: int, bits: int) -> Any:
        return record >> bits - self.end & (1 << self.width) - 1


class Flag(Bits):
    """Bit `bit` of byte `byte`."""

    def __init__(self, byte: int, bit: int) -> None:
        super().__init__(byte, 1, bit)

    def take(self, record: int, bits: int) -> bool:
        return bool(super().take(record, bits))


class Bytes(Bits):
    """`size` bytes; zeros fill up a shorter value."""

    def __init__(self, byte: int, size: int) -> None:
        super().__init__(byte, 8 * size)
        self.size = size

    def number(self, value: Any) -> int:
        if len(value) > self.size:
            raise ValueError(f"{len(value)} bytes, more than {self.size}")
        return int.from_bytes(value.ljust(self.size, b"\0"), "big")

    def take(self, record: int, bits: int) -> bytes:
        found: int = super().take(record, bits)
        return found.to_bytes(self.size, "big")


class Layout(Generic[_Record]):
    """Where the fields of a record class lie in its bytes."""

    def __init__(self, kind: type[_Record]) -> None:
        hints = get_type_hints(kind, include_extras=True)
        self.kind = kind
        self.fields: dict[str, Bits] = {
            name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")
        }
        self.size = -(-max(field.end for field in self.fields.values()) // 8)

    def encode(self, record: _Record) -> bytes:
        """The bytes of a record. ValueError, with the field's name, for a value that does not fit."""
        number = 0
        for name, field in self.fields.items():
            try:
                number |= field.put(getattr(record, name), 8 * self.size)
            except ValueError as error:
                raise ValueError(f"{name.replace('_', ' ')}: {error}") from None
        return number.to_bytes(self.size, "big")

    def decode(self, raw: bytes) -> _Record:
        """The record in these bytes; the caller has made sure that they are as many as it has."""
        number = int.from_bytes(raw, "big")
        return self.kind(**{name: field.take(number, 8 * self.size) for name, field in self.fields.items()})
