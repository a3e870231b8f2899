"""Work completions as programs see them, and words for the numbers in them. Part of `pyverbs.cq`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from emulator.roce.nic.verbs import WcFlags, WorkCompletion
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.base import PyverbsObject, listing

_WITH_INV: Final = int(WcFlags.WITH_INV)

_ABBREVIATED: Final = frozenset({"QP", "EEC", "EECN", "WR", "MW", "RDD", "RD", "RNR", "WC"})

_STATUS: Final = {
    "LOC": "local", "REM": "remote", "ERR": "error", "LEN": "length", "PROT": "protection",
    "RESP": "response", "REQ": "request", "EXC": "exceeded", "VIOL": "violation",
    "INV": "invalidate", "MW": "memory window", "OP": "op",
}  # fmt: skip

_STATUS_AS_THEY_ARE: Final[dict[int, str]] = {
    e.IBV_WC_RNR_RETRY_EXC_ERR: "RNR retry exceeded",
    e.IBV_WC_FATAL_ERR: "WC fatal error",
    e.IBV_WC_TM_ERR: "Unknown CQE status",
    e.IBV_WC_TM_RNDV_INCOMPLETE: "Unknown CQE status",
}
"""Where pyverbs' words are not those of the name."""

_OPCODES: Final[dict[int, str]] = {
    e.IBV_WC_SEND: "Send",
    e.IBV_WC_RDMA_WRITE: "RDMA write",
    e.IBV_WC_RDMA_READ: "RDMA read",
    e.IBV_WC_COMP_SWAP: "Compare and swap",
    e.IBV_WC_FETCH_ADD: "Fetch and add",
    e.IBV_WC_BIND_MW: "Bind Memory window",
    e.IBV_WC_LOCAL_INV: "Local invalidate",
    e.IBV_WC_TSO: "TSO",
    e.IBV_WC_RECV: "Receive",
    e.IBV_WC_RECV_RDMA_WITH_IMM: "Receive RDMA with immediate",
    e.IBV_WC_TM_ADD: "Tag matching - add",
    e.IBV_WC_TM_DEL: "Tag matching - delete",
    e.IBV_WC_TM_SYNC: "Tag matching - sync",
    e.IBV_WC_TM_RECV: "Tag matching - receive",
    e.IBV_WC_TM_NO_TAG: "Tag matching - no tag",
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
        parts = e.ibv_wc_status(status).name.removeprefix("IBV_WC_").split("_")
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
    return flags_to_str(flags, {flag: flag.name for flag in e.ibv_create_cq_wc_flags})


@dataclass(slots=True, eq=False)
class WC(PyverbsObject):
    """struct ibv_wc."""

    wr_id: int = 0
    status: int = 0
    opcode: int = 0
    vendor_err: int = 0
    byte_len: int = 0
    qp_num: int = 0
    src_qp: int = 0
    imm_data: int = 0
    wc_flags: int = 0
    pkey_index: int = 0
    slid: int = 0
    sl: int = 0
    dlid_path_bits: int = 0

    def __str__(self) -> str:
        return listing(
            [
                ("WR ID", self.wr_id), ("status", cqe_status_to_str(self.status)),
                ("opcode", cqe_opcode_to_str(self.opcode)), ("vendor error", self.vendor_err),
                ("byte length", self.byte_len), ("QP num", self.qp_num), ("source QP", self.src_qp),
                ("WC flags", cqe_flags_to_str(self.wc_flags)), ("pkey index", self.pkey_index),
                ("slid", self.slid), ("sl", self.sl), ("imm_data", self.imm_data),
                ("dlid path bits", self.dlid_path_bits),
            ]
        )  # fmt: skip


def swapped(number: int) -> int:
    """32 bits the other way round: immediate data is big-endian in `ibv_send_wr` and `ibv_wc`."""
    return int.from_bytes((number & 0xFFFFFFFF).to_bytes(4, "little"), "big")


def immediate(completion: WorkCompletion) -> int:
    """The union of `ibv_wc`: big-endian immediate data, or a key as it is."""
    imm = completion.imm
    return swapped(imm) if imm and not int(completion.flags) & _WITH_INV else imm


def work_completion_of(completion: WorkCompletion) -> WC:
    """What the caller gets; made without calling `__init__`, which takes twice as long."""
    wc: WC = WC.__new__(WC)
    wc.wr_id = completion.wr_id
    wc.status = completion.status
    wc.opcode = completion.opcode
    wc.vendor_err = completion.vendor_err
    wc.byte_len = completion.byte_len
    wc.qp_num = completion.qp_num
    wc.src_qp = completion.src_qp
    wc.imm_data = immediate(completion) if completion.imm else 0
    wc.wc_flags = completion.flags
    wc.pkey_index = completion.pkey_index
    wc.sl = completion.service_level
    wc.slid = wc.dlid_path_bits = 0
    return wc


@dataclass(slots=True, eq=False)
class PollCqAttr(PyverbsObject):
    """struct ibv_poll_cq_attr."""

    comp_mask: int = field(default=0, init=False)


@dataclass(slots=True, eq=False)
class WcTmInfo(PyverbsObject):
    """struct ibv_wc_tm_info."""

    priv: int = field(default=0, init=False)
    tag: int = field(default=0, init=False)
