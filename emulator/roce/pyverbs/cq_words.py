"""Words for the numbers in a work completion. Part of `pyverbs.cq`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from emulator.roce.pyverbs.enums_queues import ibv_create_cq_wc_flags, ibv_wc_opcode, ibv_wc_status

_ABBREVIATED: Final = frozenset({"QP", "EEC", "EECN", "WR", "MW", "RDD", "RD", "RNR", "WC"})

_STATUS: Final = {
    "LOC": "local", "REM": "remote", "ERR": "error", "LEN": "length", "PROT": "protection",
    "RESP": "response", "REQ": "request", "EXC": "exceeded", "VIOL": "violation",
    "INV": "invalidate", "MW": "memory window", "OP": "op",
}  # fmt: skip

_STATUS_AS_THEY_ARE: Final[dict[int, str]] = {
    ibv_wc_status.IBV_WC_RNR_RETRY_EXC_ERR: "RNR retry exceeded",
    ibv_wc_status.IBV_WC_FATAL_ERR: "WC fatal error",
    ibv_wc_status.IBV_WC_TM_ERR: "Unknown CQE status",
    ibv_wc_status.IBV_WC_TM_RNDV_INCOMPLETE: "Unknown CQE status",
}
"""Where pyverbs' words are not those of the name."""

_OPCODES: Final[dict[int, str]] = {
    ibv_wc_opcode.IBV_WC_SEND: "Send",
    ibv_wc_opcode.IBV_WC_RDMA_WRITE: "RDMA write",
    ibv_wc_opcode.IBV_WC_RDMA_READ: "RDMA read",
    ibv_wc_opcode.IBV_WC_COMP_SWAP: "Compare and swap",
    ibv_wc_opcode.IBV_WC_FETCH_ADD: "Fetch and add",
    ibv_wc_opcode.IBV_WC_BIND_MW: "Bind Memory window",
    ibv_wc_opcode.IBV_WC_LOCAL_INV: "Local invalidate",
    ibv_wc_opcode.IBV_WC_TSO: "TSO",
    ibv_wc_opcode.IBV_WC_RECV: "Receive",
    ibv_wc_opcode.IBV_WC_RECV_RDMA_WITH_IMM: "Receive RDMA with immediate",
    ibv_wc_opcode.IBV_WC_TM_ADD: "Tag matching - add",
    ibv_wc_opcode.IBV_WC_TM_DEL: "Tag matching - delete",
    ibv_wc_opcode.IBV_WC_TM_SYNC: "Tag matching - sync",
    ibv_wc_opcode.IBV_WC_TM_RECV: "Tag matching - receive",
    ibv_wc_opcode.IBV_WC_TM_NO_TAG: "Tag matching - no tag",
    0x87: "Driver WR",
}

_FLAGS: Final = {
    1: "GRH", 2: "With immediate", 4: "IP csum OK", 8: "With invalidate", 16: "TM sync request",
    32: "TM match", 64: "TM data valid",
}  # fmt: skip


def cqe_status_to_str(status: int) -> str:
    """The words of an `ibv_wc_status`, made from its name."""
    if status in _STATUS_AS_THEY_ARE:
        return _STATUS_AS_THEY_ARE[status]
    try:
        parts = ibv_wc_status(status).name.removeprefix("IBV_WC_").split("_")
    except ValueError:
        return "Unknown CQE status"
    return " ".join(_STATUS.get(part, part if part in _ABBREVIATED else part.lower()) for part in parts)


def cqe_opcode_to_str(opcode: int) -> str:
    """The words of an `ibv_wc_opcode`."""
    return _OPCODES.get(opcode, f"Unknown CQE opcode {opcode}")


def flags_to_str(flags: int, dictionary: Mapping[int, str]) -> str:
    """The words of all bits that are set, each followed by a space."""
    return "".join(f"{word} " for bit, word in dictionary.items() if flags & bit)


def cqe_flags_to_str(flags: int) -> str:
    """The words of `ibv_wc_flags`."""
    return flags_to_str(flags, _FLAGS)


def create_wc_flags_to_str(flags: int) -> str:
    """The names of `ibv_create_cq_wc_flags`."""
    return flags_to_str(flags, {flag: flag.name for flag in ibv_create_cq_wc_flags})
