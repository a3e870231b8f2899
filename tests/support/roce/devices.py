"""Programs on emulated devices: a queue pair, some memory and the connection manager's events."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

from emulator.roce.cm.attributes import queue_pair_attributes
from emulator.roce.cm.connection import CmEvent, Connection
from emulator.roce.cm.events import CmEventType, ConnectionParameters
from emulator.roce.cm.limits import CmTimes
from emulator.roce.nic.verbs import (
    Access,
    QpCapabilities,
    QpState,
    QpType,
    SendFlags,
    SendOpcode,
    Sge,
    WorkCompletion,
)
from emulator.roce.nic.work_requests import ReceiveRequest, SendRequest
from emulator.roce.runtime.device import Device
from emulator.roce.wire.cm_ip import PortSpace

PORT = 4420
BASE = 0x10000
"""What both sides call the first byte of registered memory."""

SECONDS = 20.0
IMPATIENT = CmTimes(ack_exponent=13)
"""Queue pairs give up a silent peer after eight times 34 ms: where the peer is to be given up."""
PATIENT = CmTimes(ack_exponent=18)
"""After eight times a second: where it is not, and may stand still for a while on a busy machine."""

_numbers = itertools.count(2)


def some_ip() -> str:
    """A loopback address that no other test of this machine uses now."""
    process = os.getpid()
    return f"127.{64 + process % 128}.{process // 128 % 256}.{next(_numbers) % 250 + 2}"


class Program:
    """One program with one device."""

    def __init__(
        self,
        ip: str,
        *,
        memory_bytes: int = 1 << 20,
        times: CmTimes = PATIENT,
        pcap: Path | None = None,
        check_icrc_in_full: bool = False,
    ) -> None:
        self.device = Device(f"test-{ip}", ip, times=times, pcap=pcap, check_icrc_in_full=check_icrc_in_full)
        self.memory = bytearray(memory_bytes)
        self.events: list[CmEvent] = []
        nic = self.device.nic
        with self.device.turn():
            self.pd = nic.alloc_pd()
            self.cq = nic.create_cq(1024)
            access = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
            self.region = nic.reg_mr(self.pd, memoryview(self.memory), BASE, access)
            self.qp = nic.create_qp(self.pd, QpType.RC, self.cq, self.cq, QpCapabilities(128, 128, 1, 1, 0))

    def close(self) -> None:
        self.device.close()

    def sge(self, offset: int, length: int) -> Sge:
        return Sge(BASE + offset, length, self.region.lkey)

    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: Callable[[], object], seconds: float = SECONDS) -> None:
        assert self.device.drive_until(condition, self.now() + seconds), "the time is over"

    def event(self, kind: CmEventType) -> CmEvent:
        """The next event, which is of this kind."""
        self.wait(lambda: self.events)
        event = self.events.pop(0)
        assert event.type is kind, event
        return event

    def done(self, count: int = 1, seconds: float = SECONDS) -> list[WorkCompletion]:
        """So many completions, waited for."""
        self.wait(lambda: len(self.cq) >= count, seconds)
        with self.device.turn():
            return self.cq.poll(count)

    def listen(self) -> None:
        with self.device.turn():
            self.device.cm.listen(PortSpace.TCP, PORT, self.events.append)

    def request(self, ip: str) -> Connection:
        with self.device.turn():
            connection = self.device.cm.create(self.events.append)
            connection.resolve_address(ip, PORT)
            connection.resolve_route()
            self.events.clear()
            connection.connect(ConnectionParameters(self.qp.number, b"", 16, 16), self.now())
        return connection

    def ready(self, connection: Connection) -> None:
        """The queue pair to RTS; with the lock held."""
        for state in (QpState.INIT, QpState.RTR, QpState.RTS):
            self.qp.modify(*queue_pair_attributes(connection, state))

    def accept(self) -> Connection:
        """Wait for a request and accept it; private data tell the region's key."""
        connection = self.event(CmEventType.CONNECT_REQUEST).connection
        with self.device.turn():
            self.ready(connection)
            private = self.region.rkey.to_bytes(4, "big")
            connection.accept(ConnectionParameters(self.qp.number, private, 16, 16), self.now())
        return connection

    def establish(self) -> tuple[Connection, int]:
        """The answer to `request`; the connection and the peer's key."""
        event = self.event(CmEventType.CONNECT_RESPONSE)
        with self.device.turn():
            self.ready(event.connection)
            event.connection.establish(self.now())
        return event.connection, int.from_bytes(event.private_data[:4], "big")

    # --- work ----------------------------------------------------------------------

    def post_receive(self, offset: int, length: int, wr_id: int = 0) -> None:
        with self.device.turn():
            self.qp.post_recv(ReceiveRequest(wr_id, (self.sge(offset, length),)))

    def post(
        self, opcode: SendOpcode, offset: int, length: int, *, rkey: int = 0, remote: int = 0, wr_id: int = 0
    ) -> None:
        with self.device.turn():
            self.qp.post_send(
                SendRequest(
                    wr_id, opcode, SendFlags.SIGNALED, (self.sge(offset, length),),
                    remote_address=BASE + remote, rkey=rkey,
                )
            )  # fmt: skip


def connect(first: Program, second: Program) -> tuple[Connection, Connection, int]:
    """Two programs of this process; the connections, and the second one's key."""
    second.listen()
    first.request(second.device.ip)
    passive = second.accept()
    active, rkey = first.establish()
    second.event(CmEventType.ESTABLISHED)
    return active, passive, rkey
