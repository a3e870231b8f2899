"""`pyverbs.spec`: what packets a flow rule is about. Records; the rule itself is refused (`pyverbs.flow`).

A record is a C structure of `infiniband/verbs.h`: type (4 bytes) and size (2), then the fields of the header,
then their masks in the same order. Fields are in network order. A value without a mask gets one
of all ones.
"""

from __future__ import annotations

import ctypes
import ipaddress
from abc import abstractmethod
from typing import Any, ClassVar, Final

from emulator.roce.pyverbs.base import PyverbsObject, listing
from emulator.roce.pyverbs.enums_device import ibv_flow_spec_type
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

    def __get__(self, spec: Spec | None, owner: type | None = None) -> Any:
        return self if spec is None else self.shown(spec._raw[self.name])

    def __set__(self, spec: Spec, value: Any) -> None:
        spec._raw[self.name] = self.packed(value)

    def packed(self, value: Any) -> bytes:
        """OverflowError for a number that does not fit."""
        return int(value).to_bytes(self.size, "big")

    def shown(self, raw: bytes) -> Any:
        """The value as the program sees it."""
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
    """The base of all: it cannot be made itself."""

    __slots__ = ("_raw", "_type")

    ORDER: ClassVar[tuple[str, ...]] = ()
    """The fields as they lie in the structure."""
    BYTES: ClassVar[int] = 0
    ALIGNMENT: ClassVar[int] = 2
    """Of the fields: the size of their longest number."""

    @abstractmethod
    def __init__(self) -> None:
        raise RuntimeError("This class is abstract.")

    def _begin(self, spec_type: int, is_inner: object, **given: Any) -> None:
        """Take values and masks as the caller gave them; a mask without a value does not count."""
        self._type = int(spec_type) | (ibv_flow_spec_type.IBV_FLOW_SPEC_INNER if is_inner else 0)
        self._raw: dict[str, bytes] = {}
        for name in self.ORDER:
            field: Field = getattr(type(self), name)
            value, mask = given[name], given[f"{name}_mask"]
            if value is None:
                self._raw[name] = self._raw[f"{name}_mask"] = bytes(field.size)
                continue
            self._raw[name] = field.packed(value)
            self._raw[f"{name}_mask"] = (
                field.all_ones.to_bytes(field.size, "big") if mask is None else field.packed(mask)
            )

    @property
    def size(self) -> int:
        """Bytes of the structure."""
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
        inner = ibv_flow_spec_type.IBV_FLOW_SPEC_INNER
        names = {int(kind): kind.name for kind in ibv_flow_spec_type if kind.name[14:] in _NAMED}
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
    """struct ibv_flow_spec_eth."""

    __slots__ = ()

    MAC_LEN: ClassVar[int] = 6
    MAC_MASK: ClassVar[str] = "ff:ff:ff:ff:ff:ff"
    ZERO_MAC: ClassVar[list[int]] = [0] * 6
    ORDER: ClassVar[tuple[str, ...]] = ("dst_mac", "src_mac", "ether_type", "vlan_tag")
    BYTES = 40

    dst_mac, dst_mac_mask = MacField(), MacField()
    src_mac, src_mac_mask = MacField(), MacField()
    ether_type, ether_type_mask = Field(2), Field(2)
    vlan_tag, vlan_tag_mask = Field(2), Field(2)

    def __init__(
        self,
        dst_mac: str | None = None,
        dst_mac_mask: str | None = None,
        src_mac: str | None = None,
        src_mac_mask: str | None = None,
        ether_type: int | None = None,
        ether_type_mask: int | None = None,
        vlan_tag: int | None = None,
        vlan_tag_mask: int | None = None,
        is_inner: object = 0,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in FIELDS["EthSpec"]}
        self._begin(ibv_flow_spec_type.IBV_FLOW_SPEC_ETH, is_inner, **given)

    def _set_mac(self, val: str | None) -> list[int]:
        """The six bytes of an address."""
        return list(type(self).dst_mac.packed(val))


class Ipv4ExtSpec(Spec):
    """struct ibv_flow_spec_ipv4_ext."""

    __slots__ = ()

    ORDER: ClassVar[tuple[str, ...]] = ("src_ip", "dst_ip", "proto", "tos", "ttl", "flags")
    BYTES = 32
    ALIGNMENT = 4

    dst_ip, dst_ip_mask = IpField(4), IpField(4)
    src_ip, src_ip_mask = IpField(4), IpField(4)
    proto, proto_mask = Field(1), Field(1)
    tos, tos_mask = Field(1), Field(1)
    ttl, ttl_mask = Field(1), Field(1)
    flags, flags_mask = Field(1), Field(1)

    def __init__(
        self,
        dst_ip: str | None = None,
        dst_ip_mask: str | None = None,
        src_ip: str | None = None,
        src_ip_mask: str | None = None,
        proto: int | None = None,
        proto_mask: int | None = None,
        tos: int | None = None,
        tos_mask: int | None = None,
        ttl: int | None = None,
        ttl_mask: int | None = None,
        flags: int | None = None,
        flags_mask: int | None = None,
        is_inner: object = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in FIELDS["Ipv4ExtSpec"]}
        self._begin(ibv_flow_spec_type.IBV_FLOW_SPEC_IPV4_EXT, is_inner, **given)

    @staticmethod
    def _str_to_ip(ip_str: str | None) -> int | None:
        """An address as a number."""
        return None if ip_str is None else int(ipaddress.IPv4Address(ip_str))

    @staticmethod
    def _ip_to_str(ip: int) -> str:
        """An address as text."""
        return str(ipaddress.IPv4Address(ip))


class TcpUdpSpec(Spec):
    """struct ibv_flow_spec_tcp_udp."""

    __slots__ = ()

    ORDER: ClassVar[tuple[str, ...]] = ("dst_port", "src_port")
    BYTES = 16

    dst_port, dst_port_mask = Field(2), Field(2)
    src_port, src_port_mask = Field(2), Field(2)

    def __init__(
        self,
        spec_type: int,
        dst_port: int | None = None,
        dst_port_mask: int | None = None,
        src_port: int | None = None,
        src_port_mask: int | None = None,
        is_inner: object = False,
    ) -> None:
        if spec_type not in (
            ibv_flow_spec_type.IBV_FLOW_SPEC_TCP,
            ibv_flow_spec_type.IBV_FLOW_SPEC_UDP,
        ):
            raise PyverbsError("Spec type must be IBV_FLOW_SPEC_TCP or IBV_FLOW_SPEC_UDP")
        given = {name: value for name, value in locals().items() if name in FIELDS["TcpUdpSpec"]}
        self._begin(spec_type, is_inner, **given)


class Ipv6Spec(Spec):
    """struct ibv_flow_spec_ipv6. Without addresses they are `::`; pyverbs 44 raises TypeError there."""

    __slots__ = ()

    EMPTY_IPV6: ClassVar[list[int]] = [0] * 16
    IPV6_MASK: ClassVar[str] = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
    FLOW_LABEL_MASK: ClassVar[int] = 0xFFFFF
    ORDER: ClassVar[tuple[str, ...]] = (
        "src_ip",
        "dst_ip",
        "flow_label",
        "next_hdr",
        "traffic_class",
        "hop_limit",
    )
    BYTES = 88
    ALIGNMENT = 4

    dst_ip, dst_ip_mask = IpField(16), IpField(16)
    src_ip, src_ip_mask = IpField(16), IpField(16)
    flow_label, flow_label_mask = Field(4, FLOW_LABEL_MASK), Field(4)
    next_hdr, next_hdr_mask = Field(1), Field(1)
    traffic_class, traffic_class_mask = Field(1), Field(1)
    hop_limit, hop_limit_mask = Field(1), Field(1)

    def __init__(
        self,
        dst_ip: str | None = None,
        dst_ip_mask: str | None = None,
        src_ip: str | None = None,
        src_ip_mask: str | None = None,
        flow_label: int | None = None,
        flow_label_mask: int | None = None,
        next_hdr: int | None = None,
        next_hdr_mask: int | None = None,
        traffic_class: int | None = None,
        traffic_class_mask: int | None = None,
        hop_limit: int | None = None,
        hop_limit_mask: int | None = None,
        is_inner: object = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in FIELDS["Ipv6Spec"]}
        self._begin(ibv_flow_spec_type.IBV_FLOW_SPEC_IPV6, is_inner, **given)


FIELDS: Final = {
    kind.__name__: frozenset(name + suffix for name in kind.ORDER for suffix in ("", "_mask"))
    for kind in (EthSpec, Ipv4ExtSpec, TcpUdpSpec, Ipv6Spec)
}
"""The names of values and masks of each record, which are those of its arguments."""
