"""`pyverbs.utils`: GIDs as text, and words for numbers."""

import struct
from typing import Any, Final

from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.base import PyverbsObject
from emulator.roce.pyverbs.pyverbs_error import PyverbsUserError

NO_GID: Final = bytes(16)

_WORDS = 8
"""Groups of four hexadecimal digits in the text of a GID."""

_QP_TYPES = {
    e.IBV_QPT_RC: "RC", e.IBV_QPT_UC: "UC", e.IBV_QPT_UD: "UD", e.IBV_QPT_RAW_PACKET: "Raw Packet",
    e.IBV_QPT_XRC_SEND: "XRCD_SEND", e.IBV_QPT_XRC_RECV: "XRCD_RECV", e.IBV_QPT_DRIVER: "Driver QP",
}  # fmt: skip
_QP_STATES = ("Reset", "Init", "RTR", "RTS", "SQD", "SQE", "Error", "Unknown")
_ACCESS = (
    "Local write", "Remote write", "Remote read", "Remote atomic", "MW bind", "Zero based", "On demand",
)  # fmt: skip
_MIGRATION = ("Migrated", "Re-arm", "Armed")


def be64toh(num: int) -> int:
    """A big-endian 64-bit number, as it lies in memory, in this machine's order."""
    return int(struct.unpack("=Q", struct.pack("!Q", num))[0])


def gid_str(subnet_prefix: int, interface_id: int) -> str:
    """The text of a GID; its halves are big-endian numbers that were read in this machine's order."""
    return struct.pack("=QQ", subnet_prefix, interface_id).hex(":", 2)


def gid_str_to_array(val: str) -> list[str]:
    """The sixteen bytes of a GID, each as two hexadecimal digits."""
    words = val.split(":")
    if len(words) != _WORDS or any(len(word) != 4 for word in words):
        raise PyverbsUserError(f"Invalid GID value ({val})")
    digits = "".join(words)
    int(digits, 16)
    return [digits[place : place + 2] for place in range(0, 32, 2)]


def gid_bytes(val: str) -> bytes:
    return bytes.fromhex("".join(gid_str_to_array(val)))


def gid_text(raw: str) -> Any:
    """The text of the GID whose bytes are the attribute `raw`; setting it takes the same form."""

    def write(record: object, val: str) -> None:
        setattr(record, raw, gid_bytes(val))

    return property(lambda record: getattr(record, raw).hex(":", 2), write, doc="A GID, in text.")


class GID(PyverbsObject):
    """Sixteen bytes, shown as eight groups of four digits."""

    __slots__ = ("raw",)

    def __init__(self, val: str | None = None) -> None:
        self.raw = NO_GID if val is None else gid_bytes(val)

    gid = gid_text("raw")

    def _set_gid(self, val: str) -> None:
        self.gid = val

    def __str__(self) -> str:
        return str(self.gid)


def qp_type_to_str(qp_type: int) -> str:
    return _QP_TYPES.get(qp_type, f"Unknown ({qp_type})")


def qp_state_to_str(qp_state: int) -> str:
    return _QP_STATES[qp_state] if 0 <= qp_state < len(_QP_STATES) else f"Unknown ({qp_state})"


def mtu_to_str(mtu: int) -> int:
    """Bytes of an `IBV_MTU_*`, 0 for what is none. A number in spite of the name, as in pyverbs."""
    return 128 << mtu if 1 <= mtu <= 5 else 0


def access_flags_to_str(flags: int) -> str:
    return "".join(f"{word} " for bit, word in enumerate(_ACCESS) if flags & 1 << bit)


def mig_state_to_str(mig: int) -> str:
    return _MIGRATION[mig] if 0 <= mig < len(_MIGRATION) else f"Unknown ({mig})"


def rereg_error_to_str(error: int) -> str:
    for code in e.ibv_rereg_mr_err_code:
        if code == error:
            return code.name
    return f"Unknown error ({error})"
