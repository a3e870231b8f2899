"""`pyverbs.spec`: what packets a flow rule is about. Records; the rule itself is refused (`pyverbs.flow`).

A record is a C structure of `infiniband/verbs.h`: type (4 bytes) and size (2), then the fields of the header,
then their masks in the same order. Fields are in network order. A value without a mask gets one
of all ones.
"""

import ctypes
import ipaddress
from inspect import Parameter, Signature
from typing import Any, ClassVar, Final

from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.base import PyverbsObject, listing
from emulator.roce.pyverbs.pyverbs_error import PyverbsError

U32_MASK: Final = 0xFFFFFFFF

_NAMED: Final = ("ETH", "IPV4_EXT", "IPV6", "TCP", "UDP")


class Field:
    """One field of a header, or the mask of it: a number of `size` bytes, of which the lower `bits` count."""

    def __init__(self, size: int, mask: int | None = None) -> None:
        self.size = size
        self.all_ones = (1 << 8 * size) - 1 if mask is None else mask
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, spec: "Spec | None", owner: type | None = None) -> Any:
        return self if spec is None else self.shown(spec._raw[self.name])

    def __set__(self, spec: "Spec", value: Any) -> None:
        spec._raw[self.name] = self.packed(value)

    def packed(self, value: Any) -> bytes:
        """OverflowError for a number that does not fit."""
        return int(value).to_bytes(self.size, "big")

    def shown(self, raw: bytes) -> Any:
        return int.from_bytes(raw, "big")


class MacField(Field):
    """An Ethernet address, as text of six bytes in hexadecimal; all zeros are an empty text."""

    def __init__(self) -> None:
        super().__init__(6)

    def packed(self, value: Any) -> bytes:
        if not value:
            return bytes(self.size)
        raw = bytes(int(part, 16) for part in value.split(":"))
        if len(raw) != self.size:
            raise PyverbsError(f"{value!r} is no MAC address")
        return raw

    def shown(self, raw: bytes) -> str:
        return raw.hex(":") if any(raw) else ""


class IpField(Field):
    """An IPv4 or IPv6 address, as text."""

    def packed(self, value: Any) -> bytes:
        if not value:
            return bytes(self.size)
        return (ipaddress.IPv4Address if self.size == 4 else ipaddress.IPv6Address)(value).packed

    def shown(self, raw: bytes) -> str:
        return str(ipaddress.ip_address(raw))


class Spec(PyverbsObject):
    """The base of all: it cannot be made itself. A program gives each field and then its mask."""

    __slots__ = ("_raw", "_type")

    ORDER: ClassVar[tuple[str, ...]] = ()
    """The fields as they lie in the structure."""
    BYTES: ClassVar[int] = 0
    ALIGNMENT: ClassVar[int] = 2
    """Of the fields: the size of their longest number."""

    TYPE: ClassVar[int] = 0
    """An `ibv_flow_spec_type`; 0 where the program says which."""
    signature: ClassVar[Signature]

    def __init_subclass__(cls) -> None:
        """The arguments of a record: its type where there is a choice, its fields and masks, `is_inner`."""
        word = Parameter.POSITIONAL_OR_KEYWORD
        names = [name for name, value in vars(cls).items() if isinstance(value, Field)]
        cls.signature = Signature(
            [
                *([Parameter("spec_type", word)] if not cls.TYPE else []),
                *[Parameter(name, word, default=None) for name in (*names, "is_inner")],
            ]
        )

        def make(self: Spec, *values: Any, **named: Any) -> None:
            self._begin(**cls.signature.bind(*values, **named).arguments)

        me = Parameter("self", Parameter.POSITIONAL_ONLY)
        make.__signature__ = Signature([me, *cls.signature.parameters.values()])  # type: ignore[attr-defined]
        cls.__init__ = make  # type: ignore[method-assign]

    def __init__(self, *values: Any, **named: Any) -> None:
        raise RuntimeError("This class is abstract.")

    def _begin(self, spec_type: int = 0, is_inner: object = 0, **given: Any) -> None:
        """Take values and masks as the caller gave them; a mask without a value does not count."""
        self._type = int(spec_type or self.TYPE) | (e.IBV_FLOW_SPEC_INNER if is_inner else 0)
        self._raw: dict[str, bytes] = {}
        for name in self.ORDER:
            field: Field = getattr(type(self), name)
            value, mask = given.get(name), given.get(f"{name}_mask")
            if value is None:
                self._raw[name] = self._raw[f"{name}_mask"] = bytes(field.size)
                continue
            self._raw[name] = field.packed(value)
            self._raw[f"{name}_mask"] = (
                field.all_ones.to_bytes(field.size, "big") if mask is None else field.packed(mask)
            )

    @property
    def size(self) -> int:
        return self.BYTES

    def _copy_data(self, ptr: int) -> None:
        """Write the structure, `size` bytes, to this address."""
        raw = self._padded(self._type.to_bytes(4, "little") + self.BYTES.to_bytes(2, "little"))
        for suffix in ("", "_mask"):
            raw += self._padded(b"".join(self._raw[name + suffix] for name in self.ORDER))
        ctypes.memmove(ptr, raw.ljust(self.BYTES, b"\0"), self.BYTES)

    def _padded(self, part: bytes) -> bytes:
        return part + bytes(-len(part) % self.ALIGNMENT)

    @staticmethod
    def type_to_str(spec_type: int) -> str:
        """The name of an `ibv_flow_spec_type`, with its inner flag before it. KeyError for others."""
        inner = e.IBV_FLOW_SPEC_INNER
        names = {int(kind): kind.name for kind in e.ibv_flow_spec_type if kind.name[14:] in _NAMED}
        return ("IBV_FLOW_SPEC_INNER " if spec_type & inner else "") + names[spec_type & ~inner]

    @staticmethod
    def _set_val_mask(default_mask: Any, val: Any = None, val_mask: Any = None) -> tuple[Any, Any]:
        """A value and its mask, by default `default_mask`; zeros without a value."""
        if val is None:
            return 0, 0
        return val, default_mask if val_mask is None else val_mask

    def __str__(self) -> str:
        pairs: list[tuple[str, object]] = [("Spec type", self.type_to_str(self._type)), ("Size", self.size)]
        for name in self.ORDER:
            pairs.append((name.replace("_", " "), f"{getattr(self, name)} / {getattr(self, name + '_mask')}"))
        return listing(pairs)


class EthSpec(Spec):
    __slots__ = ()

    MAC_LEN: ClassVar[int] = 6
    MAC_MASK: ClassVar[str] = "ff:ff:ff:ff:ff:ff"
    ZERO_MAC: ClassVar[list[int]] = [0] * 6
    ORDER: ClassVar[tuple[str, ...]] = ("dst_mac", "src_mac", "ether_type", "vlan_tag")
    TYPE = e.IBV_FLOW_SPEC_ETH
    BYTES = 40

    dst_mac, dst_mac_mask = MacField(), MacField()
    src_mac, src_mac_mask = MacField(), MacField()
    ether_type, ether_type_mask = Field(2), Field(2)
    vlan_tag, vlan_tag_mask = Field(2), Field(2)

    def _set_mac(self, val: str | None) -> list[int]:
        return list(type(self).dst_mac.packed(val))


class Ipv4ExtSpec(Spec):
    __slots__ = ()

    ORDER: ClassVar[tuple[str, ...]] = ("src_ip", "dst_ip", "proto", "tos", "ttl", "flags")
    TYPE = e.IBV_FLOW_SPEC_IPV4_EXT
    BYTES = 32
    ALIGNMENT = 4

    dst_ip, dst_ip_mask = IpField(4), IpField(4)
    src_ip, src_ip_mask = IpField(4), IpField(4)
    proto, proto_mask = Field(1), Field(1)
    tos, tos_mask = Field(1), Field(1)
    ttl, ttl_mask = Field(1), Field(1)
    flags, flags_mask = Field(1), Field(1)

    @staticmethod
    def _str_to_ip(ip_str: str | None) -> int | None:
        return None if ip_str is None else int(ipaddress.IPv4Address(ip_str))

    @staticmethod
    def _ip_to_str(ip: int) -> str:
        return str(ipaddress.IPv4Address(ip))


class TcpUdpSpec(Spec):
    __slots__ = ()

    ORDER: ClassVar[tuple[str, ...]] = ("dst_port", "src_port")
    BYTES = 16

    dst_port, dst_port_mask = Field(2), Field(2)
    src_port, src_port_mask = Field(2), Field(2)

    def _begin(self, spec_type: int = 0, is_inner: object = 0, **given: Any) -> None:
        if spec_type not in (e.IBV_FLOW_SPEC_TCP, e.IBV_FLOW_SPEC_UDP):
            raise PyverbsError("Spec type must be IBV_FLOW_SPEC_TCP or IBV_FLOW_SPEC_UDP")
        super()._begin(spec_type, is_inner, **given)


class Ipv6Spec(Spec):
    """struct ibv_flow_spec_ipv6. Without addresses they are `::`; pyverbs 44 raises TypeError there."""

    __slots__ = ()

    EMPTY_IPV6: ClassVar[list[int]] = [0] * 16
    IPV6_MASK: ClassVar[str] = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
    FLOW_LABEL_MASK: ClassVar[int] = 0xFFFFF
    ORDER: ClassVar[tuple[str, ...]] = (
        "src_ip", "dst_ip", "flow_label", "next_hdr", "traffic_class", "hop_limit",
    )  # fmt: skip
    TYPE = e.IBV_FLOW_SPEC_IPV6
    BYTES = 88
    ALIGNMENT = 4

    dst_ip, dst_ip_mask = IpField(16), IpField(16)
    src_ip, src_ip_mask = IpField(16), IpField(16)
    flow_label, flow_label_mask = Field(4, FLOW_LABEL_MASK), Field(4)
    next_hdr, next_hdr_mask = Field(1), Field(1)
    traffic_class, traffic_class_mask = Field(1), Field(1)
    hop_limit, hop_limit_mask = Field(1), Field(1)
