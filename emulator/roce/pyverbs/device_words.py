"""Words for the attributes of a device. Part of `pyverbs.device`."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Final

from emulator.roce.pyverbs import enums as e

_TRANSPORTS: Final = ("IB", "IWARP", "USNIC", "USNIC UDP")
_NODES: Final = {1: "CA", 2: "Switch", 3: "Router", 4: "RNIC", 5: "USNIC", 6: "USNIC UDP"}
_PORT_STATES: Final = ("NOP", "Down", "Init", "Armed", "Active", "Defer")
_PHYSICAL: Final = {
    1: "Sleep", 2: "Polling", 3: "Disabled", 4: "Port configuration training", 5: "Link up",
    6: "Link error recovery", 7: "Phy test",
}  # fmt: skip
_LINK_LAYERS: Final = ("Unspecified", "InfiniBand", "Ethernet")
_GID_TYPES: Final[dict[int, str]] = {
    e.IBV_GID_TYPE_IB: "IB",
    e.IBV_GID_TYPE_ROCE_V1: "RoCEv1",
    e.IBV_GID_TYPE_ROCE_V2: "RoCEv2",
}
_WIDTHS: Final = {1: "1X", 2: "4X", 4: "8X", 16: "2X"}
_SPEEDS: Final = {0: 0.0, 1: 2.5, 2: 5.0, 4: 5.0, 8: 10.0, 16: 14.0, 32: 25.0, 64: 50.0, 128: 100.0}
"""Gbit/s by the code of IBTA 14.2.5.6."""


def _one_of(words: tuple[str, ...], number: int, otherwise: str) -> str:
    return words[number] if 0 <= number < len(words) else otherwise


def str_from_flags(flags: int, dictionary: Mapping[int, str]) -> str:
    """The words of all bits that are set, each on a line of its own."""
    return "\n  " + "".join(f"{word}\n  " for bit, word in dictionary.items() if flags & bit)


def _named(flags: int, members: Iterable[IntEnum]) -> str:
    return str_from_flags(flags, {int(member): member.name for member in members})


def translate_gid_type(gid_type: int) -> str:
    return _GID_TYPES.get(gid_type, f"Unknown gid_type ({gid_type})")


def guid_format(num: int) -> str:
    """Groups of four digits of a GUID that is a big-endian number read in this machine's order."""
    return struct.pack("=Q", num).hex(":", 2)


def guid_to_hex(node_guid: int) -> str:
    return f"{node_guid:x}"


def translate_transport_type(transport_type: int) -> str:
    return _one_of(_TRANSPORTS, transport_type, "Unknown")


def translate_node_type(node_type: int) -> str:
    return _NODES.get(node_type, "Unknown")


def port_state_to_str(port_state: int) -> str:
    if 0 <= port_state < len(_PORT_STATES):
        return f"{_PORT_STATES[port_state]} ({port_state})"
    return f"Invalid state ({port_state})"


def translate_mtu(mtu: int) -> str:
    return f"{128 << mtu} ({mtu})" if 1 <= mtu <= 5 else f"Invalid MTU ({mtu})"


def translate_link_layer(ll: int) -> str:
    return _one_of(_LINK_LAYERS, ll, f"Invalid link layer ({ll})")


def translate_port_cap_flags(flags: int) -> str:
    return _named(flags, e.ibv_port_cap_flags)


def translate_port_cap_flags2(flags: int) -> str:
    return _named(flags, e.ibv_port_cap_flags2)


def translate_device_caps(flags: int) -> str:
    return _named(flags, e.ibv_device_cap_flags)


def phys_state_to_str(phys: int) -> str:
    return f"{_PHYSICAL[phys]} ({phys})" if phys in _PHYSICAL else "Invalid physical state"


def width_to_str(width: int) -> str:
    return f"{_WIDTHS[width]} ({width})" if width in _WIDTHS else "Invalid width"


def speed_to_str(speed: int) -> str:
    return f"{_SPEEDS[speed]} Gbps ({speed})" if speed in _SPEEDS else "Invalid speed"


def translate_event_type(event_type: int) -> str:
    """The name of an `ibv_event_type`."""
    try:
        return e.ibv_event_type(event_type).name
    except ValueError:
        return f"Unknown event_type ({event_type})"
