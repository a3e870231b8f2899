"""What the emulated NIC moves between two processes, beside what bare UDP moves on the same machine.

    python -m emulator.roce.bench                 all records, one JSON line each
    python -m emulator.roce.bench roce_write_1m   one
    python -m emulator.roce.bench --seconds 0.5   each for this long; 2 s where nothing is said

    udp_gso                 GiB/s: datagrams of the same size, 15 to a `sendmsg` with UDP_SEGMENT, received
                            with UDP_GRO and looked at by nobody: the floor of all that follows
    roce_write_1m           GiB/s: RDMA WRITEs of 1 MiB, two in flight
    roce_read_1m            GiB/s: RDMA READs of 1 MiB, two in flight
    roce_send_64b_p50_us    us: half of SENDs of 64 bytes to and fro (a round trip is both)

The peer is a process of its own, started here and gone when the measurement is over. Contents are compared
once, outside the time that is measured.
"""

import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from emulator.roce.cm.attributes import queue_pair_attributes
from emulator.roce.cm.connection import CmEvent, Connection
from emulator.roce.cm.events import CmEventType, ConnectionParameters
from emulator.roce.link.udp import UdpLink
from emulator.roce.nic import verbs
from emulator.roce.nic.queue_pair import QueuePair
from emulator.roce.nic.work_requests import ReceiveRequest, SendRequest
from emulator.roce.runtime.device import Device
from emulator.roce.wire.cm_ip import PortSpace

OWN_IP: Final = "127.0.35.2"
PEER_IP: Final = "127.0.35.3"
"""Addresses that nothing else uses; all of 127.0.0.0/8 is this machine's."""

PORT: Final = 4420
MIB: Final = 1 << 20
PROBE_SECONDS: Final = 2.0
PROBE_SECONDS_MAX: Final = 600.0
IN_FLIGHT: Final = 2
SMALL: Final = 64
PING_PONGS: Final = 4000
PING_PONGS_LEAST: Final = 200
WAIT_S: Final = 10.0

SEGMENT: Final = 4096 + 16
SEGMENTS: Final = 15

FLOOR_BUFFER_BYTES: Final = 512 << 10

_REGION: Final = struct.Struct(">IQ")
_COUNT: Final = struct.Struct("=Qdd")
_ACCESS: Final = verbs.Access.LOCAL_WRITE | verbs.Access.REMOTE_WRITE | verbs.Access.REMOTE_READ


@dataclass(frozen=True, slots=True)
class Record:
    """One number, with its unit. `details` are further keys."""

    name: str
    value: float
    unit: str
    details: Mapping[str, float] = field(default_factory=dict)

    def line(self) -> str:
        return json.dumps({"name": self.name, "value": self.value, "unit": self.unit, **self.details})


class _Party:
    """A device with one queue pair, 2 MiB of memory and the events of its connection manager."""

    def __init__(self, ip: str) -> None:
        self.device = Device("bench", ip)
        nic = self.device.nic
        self.memory = bytearray(IN_FLIGHT * MIB)
        self.events: list[CmEvent] = []
        with self.device.turn():
            self.pd = nic.alloc_pd()
            self.cq = nic.create_cq(256)
            self.region = nic.reg_mr(self.pd, memoryview(self.memory), 0x10000, _ACCESS)
            self.qp: QueuePair = nic.create_qp(
                self.pd, verbs.QpType.RC, self.cq, self.cq, verbs.QpCapabilities(64, 64, 1, 1, 0)
            )

    def sge(self, offset: int, length: int) -> verbs.Sge:
        return verbs.Sge(self.region.address + offset, length, self.region.lkey)

    def move(self, connection: Connection, *states: verbs.QpState) -> None:
        for state in states:
            self.qp.modify(*queue_pair_attributes(connection, state))

    def wait(self, condition: Callable[[], object]) -> None:
        if not self.device.drive_until(condition, time.monotonic() + WAIT_S):
            raise TimeoutError(f"nothing for {WAIT_S:g} s")

    def wait_for(self, kind: CmEventType) -> CmEvent:
        self.wait(lambda: self.events)
        event = self.events.pop(0)
        if event.type is not kind:
            raise ConnectionError(f"{event.type.name}, not {kind.name}")
        return event

    def completions(self) -> int:
        """How many there are, after waiting for one."""
        self.wait(lambda: len(self.cq))
        with self.device.turn():
            done = self.cq.poll(64)
        for completion in done:
            if completion.status is not verbs.WcStatus.SUCCESS:
                raise ConnectionError(f"a request ended with {completion.status.name}")
        return len(done)

    def post_receives(self, count: int) -> None:
        for _ in range(count):
            self.qp.post_recv(ReceiveRequest(0, (self.sge(0, SMALL),)))

    def send_small(self) -> None:
        self.qp.post_send(
            SendRequest(1, verbs.SendOpcode.SEND, verbs.SendFlags(0), (self.sge(SMALL, SMALL),))
        )


def _serve() -> None:
    """The passive side: accepts one connection and sends back what it gets, until it is disconnected."""
    party = _Party(PEER_IP)
    try:
        party.memory[:] = bytes(range(256)) * (len(party.memory) // 256)
        with party.device.turn():
            party.device.cm.listen(PortSpace.TCP, PORT, party.events.append)
        print("ready", flush=True)
        connection = party.wait_for(CmEventType.CONNECT_REQUEST).connection
        with party.device.turn():
            party.move(connection, verbs.QpState.INIT, verbs.QpState.RTR, verbs.QpState.RTS)
            party.post_receives(32)
            private = _REGION.pack(party.region.rkey, party.region.address)
            connection.accept(ConnectionParameters(party.qp.number, private, 16, 16), time.monotonic())
        party.wait_for(CmEventType.ESTABLISHED)
        while not party.events:
            party.device.drive_until(lambda: len(party.cq) or party.events)
            with party.device.turn():
                for completion in party.cq.poll(64):
                    if completion.status is verbs.WcStatus.SUCCESS:
                        party.post_receives(1)
                        party.send_small()
    finally:
        party.device.close()


def _receive_datagrams() -> None:
    """The floor's other end, until nothing has come for 0.5 s: bytes, their time, its processor time."""
    link = UdpLink(PEER_IP)
    print("ready", flush=True)
    sock = socket.socket(fileno=os.dup(link.fileno()))
    # With a larger one the sender runs ahead until the data have left the caches, and both are slower.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, FLOOR_BUFFER_BYTES)
    sock.settimeout(0.5)
    received, first, last, began = 0, 0.0, 0.0, time.process_time()
    buffers = [bytearray(1 << 16)]
    try:
        while True:
            count = sock.recvmsg_into(buffers, 64)[0]
            last = time.perf_counter()
            first = first or last
            received += count
    except TimeoutError:
        pass
    finally:
        sock.close()
        link.close()
    sys.stdout.buffer.write(_COUNT.pack(received, last - first, time.process_time() - began))


@contextmanager
def _peer(role: str) -> Iterator[subprocess.Popen[bytes]]:
    """The other process, ready."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "emulator.roce.bench", role],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise ConnectionError("the peer process did not start")
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def _connected() -> Iterator[tuple[_Party, int, int]]:
    """A connection to a peer process; the R_Key and the address of its memory."""
    with _peer("serve"):
        party = _Party(OWN_IP)
        try:
            with party.device.turn():
                connection = party.device.cm.create(party.events.append)
                connection.resolve_address(PEER_IP, PORT)
                connection.resolve_route()
                party.events.clear()
                connection.connect(ConnectionParameters(party.qp.number, b"", 16, 16), time.monotonic())
            answer = party.wait_for(CmEventType.CONNECT_RESPONSE)
            rkey, address = _REGION.unpack_from(answer.private_data)
            with party.device.turn():
                party.move(connection, verbs.QpState.INIT, verbs.QpState.RTR, verbs.QpState.RTS)
                connection.establish(time.monotonic())
            yield party, rkey, address
            with party.device.turn():
                connection.disconnect(time.monotonic())
            party.wait_for(CmEventType.DISCONNECTED)
        finally:
            party.device.close()


def udp_gso(seconds: float = PROBE_SECONDS) -> Record:
    """Bare datagrams in bursts, from one process to another."""
    with _peer("receive") as peer:
        link = UdpLink(OWN_IP)
        try:
            burst = verbs.Burst(memoryview(bytes(SEGMENT * SEGMENTS)), SEGMENT, verbs.Address(PEER_IP))
            end, bursts, began = time.perf_counter() + seconds, 0, time.process_time()
            while True:
                # At least so many, however late it is by then.
                for _ in range(16):
                    link.send(burst)
                bursts += 16
                if time.perf_counter() >= end:
                    break
            sending = time.process_time() - began
        finally:
            link.close()
        assert peer.stdout is not None
        received, took, receiving = _COUNT.unpack(peer.stdout.read(_COUNT.size))
    # Some are lost on the way: each end's time is of what went through its own hands.
    details = {
        "send_us_per_mib": sending * 1e6 * MIB / (bursts * SEGMENTS * SEGMENT),
        "receive_us_per_mib": receiving * 1e6 * MIB / received,
    }
    return Record("udp_gso", received / took / (1 << 30), "GiB/s", details)


def _one_sided(name: str, opcode: verbs.SendOpcode, seconds: float = PROBE_SECONDS) -> Record:
    with _connected() as (party, rkey, address):
        qp = party.qp

        def post(slot: int) -> None:
            local = party.sge(slot * MIB, MIB)
            request = SendRequest(slot, opcode, verbs.SendFlags.SIGNALED, (local,))
            request.remote_address, request.rkey = address + slot * MIB, rkey
            qp.post_send(request)

        with party.device.turn():
            for slot in range(IN_FLIGHT):
                post(slot)
        start = time.perf_counter()
        end = start + seconds
        done = 0
        slot = 0
        while True:
            fresh = party.completions()
            done += fresh
            now = time.perf_counter()
            if now > end:
                break
            with party.device.turn():
                for _ in range(fresh):
                    post(slot)
                    slot = (slot + 1) % IN_FLIGHT
        took = now - start
        left = IN_FLIGHT - fresh
        while left > 0:
            left -= party.completions()
        if opcode is verbs.SendOpcode.RDMA_READ and party.memory != bytes(range(256)) * (
            len(party.memory) >> 8
        ):
            raise ValueError("what was read is not what was there")
    return Record(name, done * MIB / took / (1 << 30), "GiB/s")


roce_write_1m = partial(_one_sided, "roce_write_1m", verbs.SendOpcode.RDMA_WRITE)
roce_read_1m = partial(_one_sided, "roce_read_1m", verbs.SendOpcode.RDMA_READ)


def roce_send_64b_p50_us(seconds: float = PROBE_SECONDS) -> Record:
    """Half a round trip of two SENDs."""
    with _connected() as (party, _, _):
        times: list[float] = []
        with party.device.turn():
            party.post_receives(32)
        end = time.perf_counter() + seconds
        while len(times) < PING_PONGS and (len(times) < PING_PONGS_LEAST or time.perf_counter() < end):
            start = time.perf_counter()
            with party.device.turn():
                party.send_small()
            party.completions()
            times.append(time.perf_counter() - start)
            with party.device.turn():
                party.post_receives(1)
    return Record("roce_send_64b_p50_us", statistics.median(times) / 2 * 1e6, "us")


RECORDS: Final[dict[str, Callable[[float], Record]]] = {
    "udp_gso": udp_gso,
    "roce_write_1m": roce_write_1m,
    "roce_read_1m": roce_read_1m,
    "roce_send_64b_p50_us": roce_send_64b_p50_us,
}
_ROLES: Final[dict[str, Callable[[], None]]] = {"serve": _serve, "receive": _receive_datagrams}


def main(words: list[str]) -> int:
    """Run what was asked for."""
    if len(words) == 1 and words[0] in _ROLES:
        _ROLES[words[0]]()
        return 0
    seconds = PROBE_SECONDS
    if words[:1] == ["--seconds"]:
        try:
            seconds = float(words[1])
        except (IndexError, ValueError):
            seconds = 0.0
        if not 0 < seconds <= PROBE_SECONDS_MAX:
            print(f"--seconds wants a number up to {PROBE_SECONDS_MAX:g}", file=sys.stderr)
            return 2
        words = words[2:]
    unknown = [word for word in words if word not in RECORDS]
    if unknown:
        print(f"no record {unknown[0]!r}; there are {', '.join(RECORDS)}", file=sys.stderr)
        return 2
    for name in words or RECORDS:
        print(RECORDS[name](seconds).line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
