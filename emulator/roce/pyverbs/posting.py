"""A row of work posted by one call: receives, and requests with one element of memory each. Not in pyverbs.

Between `wr_start` and `wr_complete` a request takes half a dozen calls of interpreted code, and each receive
takes the device's lock. A caller that posts both with every command (`nvmeof.transport.rdma_pair`) passes
plain tuples, and takes the lock once.
"""

import errno
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from emulator.roce.nic.queue_pair import QueuePair
from emulator.roce.nic.verbs import SendFlags, SendOpcode, Sge, VerbsError
from emulator.roce.nic.work_requests import ReceiveRequest, SendRequest
from emulator.roce.runtime.device import Device

ReceiveRow: TypeAlias = tuple[int, tuple[int, int, int]]
"""The id of the work request, and its memory: address, length, key."""

SendRow: TypeAlias = tuple[int, int, int, tuple[int, int, int] | None, int, int, Any, Any]
"""Opcode (ibv_wr_opcode), id and flags of the work request; its memory as in `ReceiveRow`; the peer's key (or
the key to invalidate, or of the window that is bound) and address; what is bound: the window, and to what
(`MWBindInfo`)."""

OPCODES: Final[dict[int, SendOpcode]] = {int(opcode): opcode for opcode in SendOpcode}
FLAGS: Final[dict[int, SendFlags]] = {bits: SendFlags(bits) for bits in range(16)}
"""Every combination of send flags that the device knows; to look one up is cheaper than to make one."""
_SEND_WITH_INV: Final = int(SendOpcode.SEND_WITH_INV)
_LOCAL_INV: Final = int(SendOpcode.LOCAL_INV)
_BIND_MW: Final = int(SendOpcode.BIND_MW)


def request_of(row: SendRow) -> SendRequest:
    """The device's own record. VerbsError for unknown opcodes or flags."""
    number, wr_id, bits, memory, key, address, window, bind = row
    opcode, flags = OPCODES.get(number), FLAGS.get(bits)
    if opcode is None or flags is None:
        raise VerbsError(errno.EINVAL, f"opcode {number}, flags {bits:#x}")
    request = SendRequest(wr_id, opcode, flags)
    if memory is not None:
        request.sges = (Sge(memory[0], memory[1], memory[2]),)
    if number in (_SEND_WITH_INV, _LOCAL_INV):
        request.invalidate_rkey = key
    elif number == _BIND_MW:
        request.window, request.window_rkey, request.bind = window.native, key, bind.bind()
    else:
        request.rkey, request.remote_address = key, address
    return request


def post(pair: QueuePair, device: Device, receives: Sequence[ReceiveRow], rows: Sequence[SendRow]) -> None:
    """Post receives, then requests: of these all or none. VerbsError where any is refused; receives before
    one that is refused are posted."""
    requests = [request_of(row) for row in rows]
    with device.turn():
        for wr_id, memory in receives:
            pair.post_recv(ReceiveRequest(wr_id, (Sge(memory[0], memory[1], memory[2]),)))
        pair.post_sends(requests)
