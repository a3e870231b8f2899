"""A host that sends exactly the bytes that a test wants, joined to a controller queue in memory.

For tests of the controller role that need what a well-behaved host never does. The well-behaved one is in
`nvme_ends.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.storage import Storage
from nvmeof.controller.subsystem import Namespace, Subsystem
from nvmeof.controller.target import Target
from nvmeof.controller.tcp_queue import TcpControllerQueue
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.tcp.pdu import (
    FROM_CONTROLLER,
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
    TermReq,
)
from nvmeof.wire.cqe import Cqe
from nvmeof.wire.fabrics import Connect, ConnectData, PropertyAccess
from nvmeof.wire.properties import Property
from nvmeof.wire.sqe import Sqe
from tests.support.nvme.entries import fabrics_entry
from tests.support.nvme.pdu_stream import take_pdu
from tests.support.nvme.pdus import encode_pdu

SUBSYSTEM = "nqn.2026-01.io.g35:test"
HOST = "nqn.2026-01.io.g35:host"
HOST_ID = bytes(range(1, 17))
ENABLE = 0x0046_0001


def make_target(
    *storages: Storage,
    settings: ControllerSettings | None = None,
    allowed_hosts: Sequence[str] | None = None,
) -> tuple[Target, Subsystem]:
    """A target with one subsystem, whose namespaces 1.. are `storages`."""
    target = Target(settings)
    subsystem = Subsystem(SUBSYSTEM, serial="0123", allowed_hosts=allowed_hosts)
    target.add_subsystem(subsystem)
    for number, storage in enumerate(storages):
        target.attach(subsystem, Namespace(number + 1, storage))
    return target, subsystem


@dataclass
class RawHost:
    """One connection. What the controller sends is collected in `pdus` (with their data)."""

    target: Target
    now: float = 100.0
    digests: Digests = NO_DIGESTS
    settings: TcpSettings | None = None
    initialize: bool = True
    max_r2t: int = 0
    data_alignment: int = 0
    pdus: list[tuple[Pdu, bytes]] = field(default_factory=list)
    woken: int = 0

    def __post_init__(self) -> None:
        self.queue = TcpControllerQueue(self.target, now=self.now, wake=self._wake, settings=self.settings)
        self._stream = bytearray()
        self._in_use = NO_DIGESTS
        if self.initialize:
            wanted = self.digests
            request = ICReq(wanted.header, wanted.data, self.max_r2t, self.data_alignment)
            self.send(b"".join(encode_pdu(request)))
            (answer, _) = self.pdus.pop()
            assert isinstance(answer, ICResp)
            assert (answer.header_digest, answer.data_digest) == wanted
            self._in_use = wanted

    def _wake(self) -> None:
        self.woken += 1

    # --- bytes ------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Give the bytes to the controller and collect what it answers."""
        rest = memoryview(data)
        while rest and not self.queue.ending:
            buffer = self.queue.next_buffer()
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            self.queue.received(count, self.now)
            rest = rest[count:]
            self.collect()

    def send_pdu(self, pdu: Pdu, data: bytes = b"") -> None:
        self.send(b"".join(encode_pdu(pdu, self._in_use, 4, (data,) if data else ())))

    def collect(self) -> None:
        """Take everything that the controller has to send, and decode it."""
        while parts := self.queue.outgoing():
            block = b"".join(parts)
            self._stream += block
            self.queue.sent(len(block))
        while (found := take_pdu(self._stream, self._in_use, FROM_CONTROLLER)) is not None:
            self.pdus.append(found)

    def run(self, now: float | None = None) -> None:
        """Let time pass, or answer a wake-up."""
        self.now = self.now if now is None else now
        self.queue.run(self.now)
        self.collect()

    # --- commands ---------------------------------------------------------------------------------------

    def submit(self, sqe: Sqe, data: bytes = b"") -> None:
        """A command capsule, with `data` in it."""
        self.send_pdu(CapsuleCmd(sqe, len(data)), data)

    def answer(self) -> tuple[Cqe, bytes]:
        """The one completion that has come, and the data that came before it."""
        data = b""
        cqe: Cqe | None = None
        for pdu, payload in self.pdus:
            if isinstance(pdu, C2HData):
                assert pdu.offset == len(data)
                data += payload
                if pdu.success:
                    cqe = Cqe(pdu.cid)
            elif isinstance(pdu, CapsuleResp):
                assert cqe is None, "two completions"
                cqe = pdu.cqe
            else:
                raise AssertionError(f"an unexpected {pdu}")
        assert cqe is not None, f"no completion in {self.pdus}"
        self.pdus.clear()
        return cqe, data

    def command(self, sqe: Sqe, data: bytes = b"") -> tuple[Cqe, bytes]:
        """Submit and take the answer; data that the controller asks for are sent."""
        inside = data if sqe.sgl.in_capsule else b""
        self.submit(sqe, inside)
        while self.pdus and isinstance(self.pdus[-1][0], R2T):
            request = self.pdus.pop()[0]
            assert isinstance(request, R2T)
            piece = data[request.offset : request.offset + request.length]
            self.send_pdu(H2CData(request.cid, request.ttag, request.offset, len(piece)), piece)
        return self.answer()

    def status(self, sqe: Sqe, data: bytes = b"") -> int:
        return self.command(sqe, data)[0].status

    def termination(self) -> TermReq:
        """The termination request that the controller has sent last."""
        assert self.queue.ending
        pdu = self.pdus[-1][0]
        assert isinstance(pdu, TermReq)
        return pdu

    # --- usual beginnings -----------------------------------------------------------------------------------

    def connect(
        self,
        qid: int = 0,
        cntlid: int = 0xFFFF,
        *,
        subsystem: str = SUBSYSTEM,
        host: str = HOST,
        host_id: bytes = HOST_ID,
        sqsize: int = 31,
        kato: int = 0,
        cattr: int = 4,
        recfmt: int = 0,
    ) -> Cqe:
        sqe = fabrics_entry(Connect(qid, sqsize, kato, cattr, recfmt), cid=7)
        data = ConnectData(host_id, cntlid, subsystem, host).encode()
        return self.command(sqe, data)[0]

    def property_set(self, offset: int, value: int) -> int:
        return self.status(fabrics_entry(PropertyAccess(offset, 4, value), cid=8))

    def property_get(self, offset: int, size: int = 4) -> int:
        return self.command(fabrics_entry(PropertyAccess(offset, size), cid=9))[0].result


def open_admin(target: Target, **connecting: object) -> tuple[RawHost, int]:
    """A connected and enabled admin queue, and the controller's id."""
    host = RawHost(target)
    cqe = host.connect(**connecting)  # type: ignore[arg-type]
    assert cqe.status == 0
    assert host.property_set(Property.CC, ENABLE) == 0
    return host, cqe.result & 0xFFFF


def open_io(
    target: Target, *, cattr: int = 4, sqsize: int = 31, settings: TcpSettings | None = None
) -> tuple[RawHost, RawHost]:
    """(admin queue, I/O queue 1) of a new controller."""
    admin, cntlid = open_admin(target)
    io = RawHost(target, settings=settings)
    assert io.connect(1, cntlid, cattr=cattr, sqsize=sqsize).status == 0
    return admin, io


NEVER = math.inf
