"""Record tests/vectors/roce/kernel_ipv4.pcap.gz and kernel_ipv6.pcap.gz: rxe against our wire formats alone.

Odd lengths, immediate data, invalidation, atomics, an RNR NAK, NAKs, marked packets, a burst that the kernel
cuts into segments, and PSNs that wrap: what the captures of ordinary programs do not have. The peer is a UDP
socket in a network namespace, which answers and asks with `encode_packet` alone; the kernel's end is a pair
of pyverbs' queue pairs on rxe. Everything that arrives, on either side, is compared.

Run it in the lab, on a guest whose kernel has rxe and veth loaded, with the Debian package python3-pyverbs:

    g35 lab run --results tests/vectors/roce -- .venv/bin/python -m tests.lab.record_roce_packets
"""

from __future__ import annotations

import ctypes
import gzip
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emulator.roce.wire.extended import Aeth, AethKind, AtomicEth, Deth, NakCode, Reth
from emulator.roce.wire.flow import Flow, gid_of, packed_address
from emulator.roce.wire.opcodes import Opcode, Operation, class_of
from emulator.roce.wire.packet import Packet
from tests.support.roce.packets import decode_packet_untrusted, encode_packet

sys.path.append("/usr/lib/python3/dist-packages")

RESULTS = Path("/run/g35/results")
ENDS = {"ipv4": ("192.168.77.1", "192.168.77.2"), "ipv6": ("fd00:77::1", "fd00:77::2")}
# linux/udp.h: send equal parts of one buffer; take packets without checksum, which rxe sends over IPv6 too.
UDP_SEGMENT, UDP_NO_CHECK6_RX = 103, 102
PEER_QUEUE_PAIR, PEER_DATAGRAMS, Q_KEY = 0x1234, 0x4321, 0x11111111
# Both sides' PSNs wrap on the way.
KERNEL_FIRST_PSN, PEER_FIRST_PSN = 0xFFFFF8, 0xFFFFFD
MTU = 1024
MEMORY = 1 << 16


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def lay_the_cable() -> None:
    """veth0 here with rxe on it, veth1 in the namespace of the peer."""
    run("ip link add veth0 type veth peer name veth1")
    run("ip netns add peer")
    run("ip link set veth1 netns peer")
    for (kernel, peer), bits in zip(ENDS.values(), (24, 64), strict=True):
        extra = " nodad" if ":" in kernel else ""
        run(f"ip address add {kernel}/{bits} dev veth0{extra}")
        run(f"ip -n peer address add {peer}/{bits} dev veth1{extra}")
    run("ip link set veth0 up")
    run("ip -n peer link set veth1 up")
    run("rdma link add rxe0 type rxe netdev veth0")


class Recorder:
    """All UDP packets to port 4791 that cross veth0, both ways."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.bind(("veth0", 0))
        self._socket.settimeout(0.2)
        self._frames: list[tuple[float, bytes]] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                frame = self._socket.recv(65536)
            except TimeoutError:
                if self._ending.is_set():  # only when nothing more is waiting
                    return
                continue
            udp = 34 if frame[12:14] == b"\x08\x00" else 54
            protocol = frame[23] if udp == 34 else frame[20]
            if protocol == 17 and frame[udp + 2 : udp + 4] == b"\x12\xb7":
                self._frames.append((time.time(), frame))

    def write(self, file: Path) -> None:
        self._ending.set()
        self._thread.join()
        self._socket.close()
        with gzip.open(file, "wb") as out:
            out.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65536, 1))
            for when, frame in self._frames:
                out.write(
                    struct.pack("<IIII", int(when), int(when % 1 * 1e6), len(frame), len(frame)) + frame
                )


class Peer:
    """The far end: it acknowledges what asks for it, and keeps all it has seen."""

    def __init__(self, kernel: str, peer: str) -> None:
        six = ":" in peer
        libc = ctypes.CDLL(None, use_errno=True)
        here = os.open("/proc/self/ns/net", os.O_RDONLY)
        there = os.open("/run/netns/peer", os.O_RDONLY)
        assert libc.setns(there, 0) == 0
        self.socket = socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM)
        if six:
            self.socket.setsockopt(socket.IPPROTO_UDP, UDP_NO_CHECK6_RX, 1)
        else:
            self.socket.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER: IP_PMTUDISC_DO
        self.socket.bind((peer, 4791))
        self.socket.settimeout(5)
        assert libc.setns(here, 0) == 0
        os.close(here)
        os.close(there)
        self.kernel = kernel
        self.out = Flow(packed_address(peer), packed_address(kernel), 4791)
        self.kernel_queue_pair = 0
        self.psn = PEER_FIRST_PSN
        self.messages = 0

    def send(self, packet: Packet) -> None:
        self.socket.sendto(encode_packet(packet, self.out), (self.kernel, 4791))

    def send_burst(self, packets: list[Packet]) -> None:
        """One call; the kernel makes one packet of each, with identification 0, 1, 2, ..."""
        raw = [encode_packet(packet, self.out, index) for index, packet in enumerate(packets)]
        segment = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", len(raw[0])))]
        self.socket.sendmsg([b"".join(raw)], segment, 0, (self.kernel, 4791))

    def receive(self) -> Packet:
        datagram, address = self.socket.recvfrom(65536)
        return decode_packet_untrusted(datagram, Flow(self.out.destination, self.out.source, address[1]))

    def serve(self, count: int) -> list[Packet]:
        """Receive that many request packets and answer them."""
        seen = []
        for _ in range(count):
            packet = self.receive()
            seen.append(packet)
            known = class_of(packet.opcode)
            self.messages += known.last
            aeth = Aeth(0x1F, self.messages & 0xFFFFFF)
            if known.operation is Operation.ATOMIC:
                self._answer(Opcode.ATOMIC_ACKNOWLEDGE, packet.psn, aeth=aeth, original=0x1122334455667788)
            elif known.operation is Operation.READ_REQUEST:
                assert packet.reth is not None
                data = bytes(range(256)) * 16
                self._answer(Opcode.READ_RESPONSE_ONLY, packet.psn, data[: packet.reth.length], aeth=aeth)
            elif packet.acknowledge and packet.deth is None:
                self._answer(Opcode.ACKNOWLEDGE, packet.psn, aeth=aeth)
        return seen

    def _answer(self, opcode: Opcode, psn: int, payload: bytes = b"", **headers: Any) -> None:
        self.send(Packet(opcode, self.kernel_queue_pair, psn, payload, **headers))

    def ask(self, opcode: Opcode, payload: bytes = b"", *, psns: int = 1, **fields: Any) -> list[Packet]:
        """Send a request and receive its answer: as many packets as PSNs."""
        self.send(Packet(opcode, self.kernel_queue_pair, self.psn, payload, acknowledge=True, **fields))
        answers = [self.receive() for _ in range(psns)]
        assert all(answer.queue_pair == PEER_QUEUE_PAIR for answer in answers)
        self.psn = (self.psn + psns) & 0xFFFFFF
        return answers


def kind_of(packet: Packet) -> tuple[AethKind | None, int]:
    assert packet.aeth is not None
    return packet.aeth.kind, packet.aeth.code


class Kernel:
    """rxe's end by pyverbs: a reliable queue pair and one for datagrams, on one piece of memory."""

    def __init__(self, kernel: str, peer: str) -> None:
        from pyverbs import enums  # type: ignore[import-not-found]
        from pyverbs.addr import GID, AHAttr, GlobalRoute  # type: ignore[import-not-found]
        from pyverbs.cq import CQ  # type: ignore[import-not-found]
        from pyverbs.device import Context  # type: ignore[import-not-found]
        from pyverbs.mr import MR  # type: ignore[import-not-found]
        from pyverbs.pd import PD  # type: ignore[import-not-found]
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr  # type: ignore[import-not-found]

        self.e = e = enums
        self.context = Context(name="rxe0")
        gids = [self.context.query_gid(1, index).gid for index in range(8)]
        index = [socket.inet_pton(socket.AF_INET6, gid) for gid in gids].index(gid_of(kernel))
        far = gid_of(peer).hex(":", 2)
        self.pd = PD(self.context)
        access = (
            e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
            | e.IBV_ACCESS_REMOTE_ATOMIC
        )  # fmt: skip
        self.mr = MR(self.pd, MEMORY, access)
        self.cq = CQ(self.context, 64)
        route = GlobalRoute(dgid=GID(far), sgid_index=index)
        self.way = AHAttr(port_num=1, is_global=1, gr=route)
        cap = QPCap(max_send_wr=64, max_recv_wr=64, max_send_sge=1, max_recv_sge=1)

        def created(kind: int) -> Any:
            return QP(self.pd, QPInitAttr(qp_type=kind, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1))

        self.rc, self.ud = created(e.IBV_QPT_RC), created(e.IBV_QPT_UD)
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = access
        attr.path_mtu = e.IBV_MTU_1024
        attr.dest_qp_num = PEER_QUEUE_PAIR
        attr.rq_psn, attr.sq_psn = PEER_FIRST_PSN, KERNEL_FIRST_PSN
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 16
        attr.min_rnr_timer = 5
        attr.timeout, attr.retry_cnt, attr.rnr_retry = 17, 7, 7
        attr.ah_attr = self.way
        self.rc.to_rts(attr)
        unreliable = QPAttr(port_num=1)
        unreliable.qkey = Q_KEY
        unreliable.sq_psn = 0x777777
        self.ud.to_rts(unreliable)

    def _sge(self, offset: int, length: int) -> list[Any]:
        from pyverbs.wr import SGE  # type: ignore[import-not-found]

        return [SGE(self.mr.buf + offset, length, self.mr.lkey)]

    def send(
        self, opcode: int, payload: bytes, set_up: Callable[[Any], None] | None = None, imm: int = 0
    ) -> None:
        from pyverbs.wr import SendWR

        if payload:
            self.mr.write(payload, len(payload))
        sges = self._sge(0, len(payload))
        request = SendWR(
            opcode=opcode, num_sge=len(sges), sg=sges, imm_data=imm, send_flags=self.e.IBV_SEND_SIGNALED
        )
        if set_up is not None:
            set_up(request)
        (self.ud if set_up is not None and set_up.__name__ == "datagram" else self.rc).post_send(request)

    def receive(self, pair: Any, offset: int, length: int) -> None:
        from pyverbs.wr import RecvWR

        sges = self._sge(offset, length)
        pair.post_recv(RecvWR(num_sge=len(sges), sg=sges))

    def completed(self) -> Any:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            count, completions = self.cq.poll(1)
            if count:
                assert completions[0].status == 0, completions[0]
                return completions[0]
        raise TimeoutError("no completion")


def kernel_asks(kernel: Kernel, peer: Peer) -> None:
    """rxe as requester: each message as it should be, and completed by our answer."""
    from pyverbs.addr import AH

    e = kernel.e

    def remote(request: Any) -> None:
        request.set_wr_rdma(0xDEADBEEF, 0x0123456789ABCDE8)

    def atomic(request: Any) -> None:
        request.set_wr_atomic(0xDEADBEEF, 0x0123456789ABCDE8, 0x1111111111111111, 0x2222222222222222)

    cases: list[tuple[int, bytes, Any, int]] = [
        (e.IBV_WR_SEND, b"x" * size, None, 0) for size in (0, 1, 2, 3, 4)
    ]
    cases += [
        (e.IBV_WR_SEND, b"a" * 2051, None, 0),
        (e.IBV_WR_SEND_WITH_IMM, b"b" * 5, None, 0x01020304),
        (e.IBV_WR_SEND_WITH_IMM, b"c" * 2050, None, 0x01020304),
        (e.IBV_WR_RDMA_WRITE, b"d" * 7, remote, 0),
        (e.IBV_WR_RDMA_WRITE, b"e" * 2049, remote, 0),
        (e.IBV_WR_RDMA_WRITE_WITH_IMM, b"f" * 6, remote, 0x01020304),
        (e.IBV_WR_RDMA_WRITE_WITH_IMM, b"g" * 1025, remote, 0x01020304),
        (e.IBV_WR_SEND_WITH_INV, b"h" * 9, None, 0x01020304),
        (e.IBV_WR_SEND_WITH_INV, b"i" * 1027, None, 0x01020304),
        (e.IBV_WR_ATOMIC_CMP_AND_SWP, b"j" * 8, atomic, 0),
        (e.IBV_WR_ATOMIC_FETCH_AND_ADD, b"k" * 8, atomic, 0),
        (e.IBV_WR_RDMA_READ, b"l" * 5, remote, 0),
    ]
    psn = KERNEL_FIRST_PSN
    for opcode, payload, set_up, imm in cases:
        kernel.send(opcode, payload, set_up, imm)
        bodiless = opcode in (e.IBV_WR_ATOMIC_CMP_AND_SWP, e.IBV_WR_ATOMIC_FETCH_AND_ADD, e.IBV_WR_RDMA_READ)
        packets = peer.serve(1 if bodiless else max(1, -(-len(payload) // MTU)))
        assert b"".join(bytes(p.payload) for p in packets) == (b"" if bodiless else payload)
        for packet in packets:
            assert packet.psn == psn, (packet, psn)
            psn = (psn + 1) & 0xFFFFFF
        kernel.completed()
    assert kernel.mr.read(5, 0) == bytes(range(5))

    handle = AH(kernel.pd, attr=kernel.way)

    def datagram(request: Any) -> None:
        request.set_wr_ud(handle, PEER_DATAGRAMS, Q_KEY)

    for opcode, payload in ((e.IBV_WR_SEND, b"m" * 5), (e.IBV_WR_SEND_WITH_IMM, b"n" * 6)):
        kernel.send(opcode, payload, datagram, 0x01020304)
        (packet,) = peer.serve(1)
        assert packet.deth == Deth(Q_KEY, kernel.ud.qp_num)
        assert packet.payload == payload
        kernel.completed()


def peer_asks(kernel: Kernel, peer: Peer) -> None:
    """rxe as responder: our requests are carried out, and the wrong ones refused as they should be."""
    here, key = kernel.mr.buf, kernel.mr.rkey

    (answer,) = peer.ask(Opcode.SEND_ONLY, b"12345")
    assert kind_of(answer) == (AethKind.RNR_NAK, 5)
    peer.psn = (peer.psn - 1) & 0xFFFFFF
    for offset in (100, 200, 300, 400, 500):
        kernel.receive(kernel.rc, offset, 64)
    (answer,) = peer.ask(Opcode.SEND_ONLY, b"12345")
    assert kind_of(answer)[0] is AethKind.ACK
    assert kernel.completed().byte_len == 5
    assert kernel.mr.read(5, 100) == b"12345"
    # Marked on the way, as a congested switch does it: the ICRC was made before.
    (answer,) = peer.ask(
        Opcode.SEND_ONLY_WITH_IMMEDIATE, b"678", immediate=7, fecn=True, becn=True, migration=True
    )
    assert kind_of(answer)[0] is AethKind.ACK
    assert kernel.completed().byte_len == 3
    (answer,) = peer.ask(
        Opcode.WRITE_ONLY_WITH_IMMEDIATE, b"abcdef", immediate=8, reth=Reth(here + 1000, key, 6)
    )
    assert kind_of(answer)[0] is AethKind.ACK
    assert kernel.completed().byte_len == 6
    assert kernel.mr.read(6, 1000) == b"abcdef"
    (answer,) = peer.ask(Opcode.WRITE_ONLY, b"ABC", reth=Reth(here + 1001, key, 3))
    assert kernel.mr.read(6, 1000) == b"aABCef"

    kernel.mr.write(bytes(range(256)) * 16, 4096)
    (answer,) = peer.ask(Opcode.READ_REQUEST, reth=Reth(here + 3, key, 7))
    assert (answer.opcode, answer.payload) == (Opcode.READ_RESPONSE_ONLY, bytes(range(3, 10)))
    parts = peer.ask(Opcode.READ_REQUEST, psns=3, reth=Reth(here, key, 2051))
    assert [part.opcode for part in parts] == [
        Opcode.READ_RESPONSE_FIRST, Opcode.READ_RESPONSE_MIDDLE, Opcode.READ_RESPONSE_LAST,
    ]  # fmt: skip
    assert b"".join(bytes(part.payload) for part in parts) == (bytes(range(256)) * 16)[:2051]
    kernel.mr.write((41).to_bytes(8, "little"), 8)
    (answer,) = peer.ask(Opcode.FETCH_ADD, atomic=AtomicEth(here, key, 1, 0))
    assert answer.original == 41
    (answer,) = peer.ask(Opcode.COMPARE_SWAP, atomic=AtomicEth(here, key, 77, 42))
    assert answer.original == 42
    assert kernel.mr.read(8, 0) == (77).to_bytes(8, "little")

    kernel.receive(kernel.ud, 2000, 128)
    peer.send(Packet(Opcode.UD_SEND_ONLY, kernel.ud.qp_num, 5, b"hello", deth=Deth(Q_KEY, PEER_DATAGRAMS)))
    assert kernel.completed().byte_len == 45
    assert kernel.mr.read(5, 2040) == b"hello"

    # A message of which the middle is one call to the kernel.
    body = bytes(range(1, 251)) * 21
    pieces = [body[start : start + MTU] for start in range(0, len(body), MTU)]
    middle = [
        Packet(Opcode.WRITE_MIDDLE, peer.kernel_queue_pair, (peer.psn + index) & 0xFFFFFF, piece)
        for index, piece in enumerate(pieces[:-1])
    ]
    reth = Reth(here + 8192, key, len(body))
    peer.send(middle[0]._replace(opcode=Opcode.WRITE_FIRST, reth=reth))
    peer.send_burst(middle[1:])
    peer.psn = (peer.psn + len(middle)) & 0xFFFFFF
    (answer,) = peer.ask(Opcode.WRITE_LAST, pieces[-1])
    assert kind_of(answer)[0] is AethKind.ACK
    assert kernel.mr.read(len(body), 8192) == body

    expected = peer.psn
    peer.psn = (peer.psn + 5) & 0xFFFFFF
    (answer,) = peer.ask(Opcode.SEND_ONLY, b"too far")
    assert kind_of(answer) == (AethKind.NAK, NakCode.PSN_SEQUENCE_ERROR)
    assert answer.psn == expected
    peer.psn = expected
    (answer,) = peer.ask(Opcode.WRITE_ONLY, b"no", reth=Reth(here, key ^ 0xFF00, 2))
    assert kind_of(answer) == (AethKind.NAK, NakCode.REMOTE_ACCESS_ERROR)


def record(name: str) -> None:
    ends = ENDS[name]
    recorder, peer, kernel = Recorder(), Peer(*ends), Kernel(*ends)
    peer.kernel_queue_pair = kernel.rc.qp_num
    try:
        kernel_asks(kernel, peer)
        peer_asks(kernel, peer)
    finally:
        recorder.write(RESULTS / f"kernel_{name}.pcap.gz")
        peer.socket.close()
    print(f"recorded: {name}")


def main() -> None:
    lay_the_cable()
    for name in ENDS:
        record(name)


if __name__ == "__main__":
    main()
