"""What Linux' host really sends, from captures, answered by our controller as Linux' own target answered.

The lab tests, with a real kernel, say the same at greater length. Every command of the host is given to our
controller in its order; the status must be the target's own, but where the two offer different things.
"""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path

import pytest

from nvmeof.controller.subsystem import Namespace, Subsystem
from nvmeof.controller.target import Target
from nvmeof.tcp.pdu import (
    NO_DIGESTS,
    R2T,
    C2HData,
    CapsuleCmd,
    CapsuleResp,
    Digests,
    H2CData,
    ICReq,
    ICResp,
    Pdu,
)
from nvmeof.wire.fabrics import FabricsType, decode_connect_data_untrusted
from nvmeof.wire.log_page import LogPage
from nvmeof.wire.properties import Configuration
from nvmeof.wire.sqe import AdminOpcode, Sqe
from nvmeof.wire.status import Status
from tests.support.lab.packet_capture import Connection, read_connections
from tests.support.nvme.heap_storage import HeapStorage
from tests.support.nvme.pdu_stream import take_pdu
from tests.support.nvme.raw_host import RawHost

CAPTURES = Path(__file__).parents[2] / "vectors" / "kernel_tcp"


def pdus(stream: bytes, digests: Digests = NO_DIGESTS) -> list[tuple[Pdu, bytes]]:
    """A stream taken apart; digests begin after the initialization, which agrees on them."""
    found: list[tuple[Pdu, bytes]] = []
    rest = bytearray(stream)
    while (taken := take_pdu(rest, digests)) is not None:
        found.append(taken)
        pdu, _ = taken
        if isinstance(pdu, ICReq | ICResp):
            digests = Digests(pdu.header_digest, pdu.data_digest)
    return found


def statuses(connection: Connection) -> dict[int, deque[int]]:
    """What the kernel's target answered, by command id, in order."""
    found: dict[int, deque[int]] = defaultdict(deque)
    for pdu, _ in pdus(bytes(connection.from_server)):
        if isinstance(pdu, CapsuleResp):
            found[pdu.cqe.cid].append(pdu.cqe.status)
        elif isinstance(pdu, C2HData) and pdu.success:
            found[pdu.cid].append(0)
    return found


def is_connect(sqe: Sqe) -> bool:
    return sqe.opcode == AdminOpcode.FABRICS and sqe.fctype == FabricsType.CONNECT


def is_shutdown(sqe: Sqe) -> bool:
    is_set = sqe.opcode == AdminOpcode.FABRICS and sqe.fctype == FabricsType.PROPERTY_SET
    return is_set and Configuration.of_number(sqe.cdw12).shutdown != 0


def offers_differ(sqe: Sqe, qid: int) -> bool:
    """Asymmetric access is the kernel's own; we do not claim it, and so would not be asked."""
    return qid == 0 and sqe.opcode == AdminOpcode.GET_LOG_PAGE and sqe.cdw10 & 0xFF == LogPage.ANA


@pytest.mark.parametrize("name", ["tcp_nodig", "tcp_nvme"], ids=["plain", "digests"])
def test_every_command_of_a_kernel_host(name: str) -> None:
    target = Target()
    answered = 0
    open_hosts = []
    for connection in read_connections(CAPTURES / f"{name}.pcap.gz"):
        (first, _), *rest = pdus(bytes(connection.from_client))
        assert isinstance(first, ICReq)
        expected = statuses(connection)
        host = RawHost(target, digests=Digests(first.header_digest, first.data_digest))
        open_hosts.append(host)
        for pdu, data in rest:
            if isinstance(pdu, H2CData):
                (asked, _) = host.pdus.pop()
                assert isinstance(asked, R2T)
                assert (asked.cid, asked.offset, asked.length) == (pdu.cid, pdu.offset, pdu.data_length)
                host.send_pdu(pdu._replace(ttag=asked.ttag), data)
                assert host.answer()[0].status == expected[pdu.cid].popleft()
                continue
            assert isinstance(pdu, CapsuleCmd)
            sqe = pdu.sqe
            if is_connect(sqe):
                offer(target, decode_connect_data_untrusted(data).subsystem_nqn)
            if is_shutdown(sqe):
                # The host says goodbye on the admin queue after its I/O queues; here they come later.
                break
            host.submit(sqe, data)
            if not host.pdus:
                assert sqe.opcode == AdminOpcode.ASYNC_EVENT_REQUEST
                continue
            if isinstance(host.pdus[-1][0], R2T):
                continue
            cqe, _ = host.answer()
            answered += 1
            if offers_differ(sqe, host.queue.session.qid):
                assert cqe.status == Status.INVALID_LOG_PAGE
            else:
                assert cqe.status == expected[sqe.cid].popleft(), sqe
    assert answered >= 28
    assert len(open_hosts) == 2


def offer(target: Target, nqn: str) -> None:
    """The subsystem that the host is about to connect to, with the namespace of the recording."""
    if target.find_subsystem(nqn) is None:
        subsystem = Subsystem(nqn, serial="1")
        target.add_subsystem(subsystem)
        target.attach(subsystem, Namespace(1, HeapStorage(4096, lba_bytes=512)))
