"""Work completions as programs see them. Part of `pyverbs.cq`."""

from __future__ import annotations

from typing import Final

from emulator.roce.nic.verbs import WcFlags, WorkCompletion
from emulator.roce.pyverbs.base import PyverbsObject, listing
from emulator.roce.pyverbs.cq_words import cqe_flags_to_str, cqe_opcode_to_str, cqe_status_to_str

_WITH_INV: Final = int(WcFlags.WITH_INV)


class WC(PyverbsObject):
    """struct ibv_wc."""

    __slots__ = (
        "byte_len", "dlid_path_bits", "imm_data", "opcode", "pkey_index", "qp_num", "sl", "slid", "src_qp",
        "status", "vendor_err", "wc_flags", "wr_id",
    )  # fmt: skip

    def __init__(
        self,
        wr_id: int = 0,
        status: int = 0,
        opcode: int = 0,
        vendor_err: int = 0,
        byte_len: int = 0,
        qp_num: int = 0,
        src_qp: int = 0,
        imm_data: int = 0,
        wc_flags: int = 0,
        pkey_index: int = 0,
        slid: int = 0,
        sl: int = 0,
        dlid_path_bits: int = 0,
    ) -> None:
        self.wr_id = wr_id
        self.status = status
        self.opcode = opcode
        self.vendor_err = vendor_err
        self.byte_len = byte_len
        self.qp_num = qp_num
        self.src_qp = src_qp
        self.imm_data = imm_data
        self.wc_flags = wc_flags
        self.pkey_index = pkey_index
        self.slid = slid
        self.sl = sl
        self.dlid_path_bits = dlid_path_bits

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


class PollCqAttr(PyverbsObject):
    """struct ibv_poll_cq_attr."""

    __slots__ = ("comp_mask",)

    def __init__(self) -> None:
        self.comp_mask = 0


class WcTmInfo(PyverbsObject):
    """struct ibv_wc_tm_info."""

    __slots__ = ("priv", "tag")

    def __init__(self) -> None:
        self.priv = self.tag = 0
