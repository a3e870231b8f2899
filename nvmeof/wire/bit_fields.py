"""Records of a fixed layout: each field says in its annotation which bits are its own.

    cntlid: Annotated[int, Bits(16, 16)]             bytes 16 and 17
    shutdown: Annotated[int, Bits(0, 2, 14)]         bits 15 and 14 of the number that begins with byte 0
    srq: Annotated[bool, Flag(27, 4)]                bit 4 of byte 27

Bits that no field has are reserved: zero when sent, not looked at when received.
"""

from typing import Any, ClassVar, Final, Literal, Self, TypeAlias, get_type_hints

Order: TypeAlias = Literal["little", "big"]


class Bits:
    """A number of `width` bits, which begins at bit `bit` of byte `byte`.

    It begins with its lowest bit in a little-endian record, with its highest in a big-endian one.
    """

    def __init__(self, byte: int, width: int, bit: int | None = None) -> None:
        self.width = width
        first = 0 if bit is None else bit
        self.first: Final[dict[Order, int]] = {
            "little": 8 * byte + first, "big": 8 * byte + (0 if bit is None else 7 - first),
        }  # fmt: skip
        """Bits of the record before the field, by the order of its bytes."""

    def number(self, value: Any, order: Order) -> int:
        """The value as a number. ValueError where it has too many bits: a neighbour would be changed."""
        if not 0 <= value < 1 << self.width:
            raise ValueError(f"{value:#x} does not fit into {self.width} bits")
        return int(value)

    def value(self, number: int, order: Order) -> Any:
        return number

    def put(self, value: Any, layout: "Layout") -> int:
        """The value in its place in a record."""
        return self.number(value, layout.order) << layout.shift(self)

    def take(self, record: int, layout: "Layout") -> Any:
        return self.value(record >> layout.shift(self) & (1 << self.width) - 1, layout.order)


class Flag(Bits):
    """Bit `bit` of byte `byte`."""

    def __init__(self, byte: int, bit: int) -> None:
        super().__init__(byte, 1, bit)

    def value(self, number: int, order: Order) -> bool:
        return bool(number)


class Bytes(Bits):
    """`size` bytes; zeros fill up a shorter value, unless it is to be `whole`."""

    def __init__(self, byte: int, size: int, *, whole: bool = False) -> None:
        super().__init__(byte, 8 * size)
        self.size = size
        self.whole = whole

    def number(self, value: Any, order: Order) -> int:
        if len(value) > self.size or (self.whole and len(value) != self.size):
            raise ValueError(f"{len(value)} bytes, {'not' if self.whole else 'more than'} {self.size}")
        return int.from_bytes(value.ljust(self.size, b"\0"), order)

    def value(self, number: int, order: Order) -> Any:
        return number.to_bytes(self.size, order)


class Layout:
    """Where the fields of a record class lie in its bytes."""

    def __init__(self, kind: "type[Record]") -> None:
        hints = get_type_hints(kind, include_extras=True)
        self.order: Order = kind.ORDER
        self.fields: dict[str, Bits] = {
            name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")
        }
        ends = (field.first[self.order] + field.width for field in self.fields.values())
        self.size = kind.BYTES or -(-max(ends) // 8)

    def shift(self, field: Bits) -> int:
        """How far to the left a field is in the number that the bytes of a record are."""
        first = field.first[self.order]
        return first if self.order == "little" else 8 * self.size - first - field.width


_LAYOUTS: Final[dict[type, Layout]] = {}


def layout_of(kind: "type[Record]") -> Layout:
    return _LAYOUTS.get(kind) or _LAYOUTS.setdefault(kind, Layout(kind))


class Record:
    """The base of frozen dataclasses with slots. Fields without bits are the subclass's own affair."""

    __slots__ = ()
    ORDER: ClassVar[Order] = "little"
    BYTES: ClassVar[int] = 0
    """The size, where bytes behind the last field belong to the record."""

    def to_number(self) -> int:
        """The record as one number. ValueError, with the field's name, for a value that does not fit."""
        layout, number = layout_of(type(self)), 0
        for name, field in layout.fields.items():
            try:
                number |= field.put(getattr(self, name), layout)
            except ValueError as error:
                raise ValueError(f"{name.replace('_', ' ')}: {error}") from None
        return number

    @classmethod
    def of_number(cls, number: int, **more: Any) -> Self:
        """`more` are the fields without bits."""
        layout = layout_of(cls)
        return cls(**{name: field.take(number, layout) for name, field in layout.fields.items()}, **more)

    def encode(self) -> bytes:
        """The bytes of the record. ValueError as `to_number`."""
        layout = layout_of(type(self))
        return self.to_number().to_bytes(layout.size, layout.order)

    @classmethod
    def decode(cls, raw: bytes | bytearray | memoryview, **more: Any) -> Self:
        """The record in these bytes; the caller has made sure that they are as many as it has."""
        return cls.of_number(int.from_bytes(raw, layout_of(cls).order), **more)


class BigEndianRecord(Record):
    """A record in the order of the network."""

    __slots__ = ()
    ORDER: ClassVar[Order] = "big"
