"""The kernel's side of a connection played back to our device: it must say what the kernel's peer said.

The captures are perftest's, kernel to kernel. Once our device stands where the kernel's responder stood,
and once where its requester stood; MSNs, PSNs, acknowledge requests and data must be the same, packet by
packet.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from emulator.roce.nic.nic import Nic
from emulator.roce.nic.verbs import Address, AddressVector, QpState, SendOpcode, WcStatus
from emulator.roce.wire.flow import flow_of, text_address
from emulator.roce.wire.opcodes import class_of
from emulator.roce.wire.packet import Packet
from tests.support.roce.captures import VECTORS, Captured, read_packets
from tests.support.roce.ends import End, attributes_for, make_end, move_up
from tests.support.roce.memory_network import output_of
from tests.support.roce.packets import decode_packet_untrusted

FILES = ["ib_write_bw", "ib_send_bw", "ib_read_bw", "ib_atomic_bw"]
SIZE = 8192


class Playback:
    """A capture, and an end of ours in the place of one of its two."""

    def __init__(self, name: str, *, responder: bool) -> None:
        captured = list(read_packets(VECTORS / f"{name}.pcap.gz"))
        self.packets = [(one, decode_packet_untrusted(one.datagram, one.flow, one.ip_id)) for one in captured]
        self.requests = [pair for pair in self.packets if class_of(pair[1].opcode).request]
        self.answers = [pair for pair in self.packets if not class_of(pair[1].opcode).request]
        heard, said = (self.requests, self.answers) if responder else (self.answers, self.requests)
        self.peer_ip = text_address(heard[0][0].flow.source)
        self.ip = text_address(said[0][0].flow.source)
        nic = Nic(self.ip, rng=random.Random(1), mtu=1024)
        nic.solve_identification = True
        base, key = self._memory()
        self.end = end = make_end(nic, SIZE, base=base)
        # The device's numbers are those of the capture, as nothing can be changed under an ICRC.
        end.region.lkey = key
        nic.keys._regions[key >> 8] = end.region
        nic._qps[heard[0][1].queue_pair] = end.qp
        end.qp.number = heard[0][1].queue_pair
        first = self.requests[0][1].psn
        attributes = attributes_for(
            end, end, rq_psn=first, sq_psn=first, max_rd_atomic=16, max_dest_rd_atomic=16
        )
        attributes.av = AddressVector(self.peer_ip)
        attributes.dest_qpn = said[0][1].queue_pair
        move_up(end, attributes, QpState.RTS)

    def _memory(self) -> tuple[int, int]:
        first = self.requests[0][1]
        if first.reth is not None:
            return first.reth.address, first.reth.r_key
        if first.atomic is not None:
            return first.atomic.address, first.atomic.r_key
        return 0x10000, 0x4321

    def hear(self, captured: Captured) -> None:
        """A packet from the other side."""
        data = memoryview(captured.datagram)
        source = Address(self.peer_ip, captured.flow.source_port)
        self.end.nic.receive(data, len(data), source, 0.0)

    def said(self) -> list[Packet]:
        """What our device says now."""
        flow = flow_of(self.ip, self.peer_ip, 4791)
        packets = []
        for burst in output_of(self.end.nic):
            for at in range(0, len(burst.data), burst.segment_size):
                packets.append(decode_packet_untrusted(burst.data[at : at + burst.segment_size], flow, 0))
        return packets


def _comparable(packet: Packet) -> Packet:
    # We set MigReq as hardware does, and rxe does not.
    return packet._replace(payload=bytes(packet.payload), migration=False)


def _fill_with_what_was_there(end: End, playback: Playback) -> None:
    """What the kernel's memory held, as far as its answers tell."""
    view = end.memory.view
    for _, answer in playback.answers:
        position = answer.psn - playback.requests[0][1].psn
        if answer.original is not None:
            (request,) = (r for _, r in playback.requests if r.psn == answer.psn)
            assert request.atomic is not None
            at = request.atomic.address - end.region.address
            view[at : at + 8] = answer.original.to_bytes(8, "little")
        elif answer.payload:
            at = position % 6 * 1024
            view[at : at + len(answer.payload)] = answer.payload


@pytest.mark.parametrize("name", FILES)
def test_our_answers_are_the_kernels(name: str) -> None:
    playback = Playback(name, responder=True)
    end = playback.end
    _fill_with_what_was_there(end, playback)
    for _ in playback.requests:
        end.receive(end.sge(0, 6000))
    said: list[Packet] = []
    for captured, _ in playback.requests:
        playback.hear(captured)
        said += playback.said()
    assert [_comparable(p) for p in said] == [_comparable(p) for _, p in playback.answers]
    if name in ("ib_write_bw", "ib_send_bw"):
        received = b"".join(bytes(p.payload) for _, p in playback.requests[-6:])
        assert bytes(end.memory.view[:6000]) == received


REQUESTS: dict[str, Callable[[End, Packet], None]] = {
    "ib_write_bw": lambda end, p: _post(end, SendOpcode.RDMA_WRITE, p, 6000),
    "ib_send_bw": lambda end, p: _post(end, SendOpcode.SEND, p, 6000),
    "ib_read_bw": lambda end, p: _post(end, SendOpcode.RDMA_READ, p, 6000),
    "ib_atomic_bw": lambda end, p: _post(end, SendOpcode.ATOMIC_FETCH_AND_ADD, p, 8),
}


def _post(end: End, opcode: SendOpcode, packet: Packet, length: int) -> None:
    remote = packet.reth or packet.atomic
    rest: dict[str, object] = {}
    if remote is not None:
        rest = {"remote_address": remote.address, "rkey": remote.r_key}
    if packet.atomic is not None:
        rest["compare_add"] = packet.atomic.swap_or_add
    end.post(opcode, end.sge(0, length), **rest)


@pytest.mark.parametrize("name", FILES)
def test_our_requests_are_the_kernels(name: str) -> None:
    playback = Playback(name, responder=False)
    end = playback.end
    requests = [packet for _, packet in playback.requests]
    firsts = [packet for packet in requests if class_of(packet.opcode).first]
    payload = b"".join(bytes(packet.payload) for packet in requests[:6])
    if name in ("ib_write_bw", "ib_send_bw"):
        end.memory.view[: len(payload)] = payload
    for packet in firsts:
        REQUESTS[name](end, packet)
    assert [_comparable(p) for p in playback.said()] == [_comparable(p) for p in requests]
    for captured, _ in playback.answers:
        playback.hear(captured)
    assert [c.status for c in end.polled()] == [WcStatus.SUCCESS] * len(firsts)
    if name == "ib_read_bw":
        data = b"".join(bytes(p.payload) for _, p in playback.answers[-6:])
        assert bytes(end.memory.view[:6000]) == data
    if name == "ib_atomic_bw":
        assert int.from_bytes(end.memory.view[:8], "little") == playback.answers[-1][1].original
