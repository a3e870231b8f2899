"""What the Linux kernel's soft-RoCE sent, byte for byte: it parses, re-encodes, and its ICRC is right.

Who sent it, and to whom: tests/vectors/roce.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from emulator.roce.nic.verbs import GSI_QKEY, GSI_QPN
from emulator.roce.wire.bth import psn_difference
from emulator.roce.wire.cm_ip import IpCmHeader, PortSpace, decode_ip_cm_untrusted, port_of
from emulator.roce.wire.cm_messages import (
    NO_PATH,
    CmMessage,
    CmPath,
    ConnectReject,
    ConnectReply,
    ConnectRequest,
    DisconnectReply,
    DisconnectRequest,
    MessageKind,
    ReadyToUse,
    RejectReason,
    decode_cm_untrusted,
    encode_cm,
)
from emulator.roce.wire.extended import Aeth, AethKind, AtomicEth, NakCode, Reth
from emulator.roce.wire.flow import Flow, ip_and_udp_headers, packed_address
from emulator.roce.wire.icrc import icrc_of
from emulator.roce.wire.malformed import Cause, MalformedPacket
from emulator.roce.wire.opcodes import Opcode, Service, class_of
from emulator.roce.wire.packet import Packet, decode_transport_untrusted
from tests.support.roce.captures import LARGE, VECTORS, Captured, read_packets, small_captures
from tests.support.roce.packets import decode_packet_untrusted, encode_headers, encode_packet, ip_id_of

ONE, TWO = packed_address("192.168.77.1"), packed_address("192.168.77.2")


def check_kernel_packet(captured: Captured) -> Packet:
    """Everything that holds for each packet of the kernel."""
    flow, datagram = captured.flow, captured.datagram
    packet = decode_packet_untrusted(datagram, flow, captured.ip_id)
    assert encode_packet(packet, flow, captured.ip_id) == datagram
    assert len(encode_headers(packet, len(packet.payload))) == class_of(packet.opcode).header_bytes
    assert icrc_of(datagram[:-4], flow, captured.ip_id) == int.from_bytes(datagram[-4:], "little")
    # As a UDP socket sees it, without the IP header: the identification comes out of the ICRC.
    assert ip_id_of(datagram, flow) == captured.ip_id
    assert decode_packet_untrusted(memoryview(datagram), flow) == packet
    # Over IPv6 we send a UDP checksum, as the RFC demands; rxe does not.
    without_checksum = slice(None, -2) if flow.is_ipv6 else slice(None)
    headers = ip_and_udp_headers(flow, datagram, captured.ip_id)
    assert headers[without_checksum] == captured.headers[without_checksum]
    if packet.queue_pair == GSI_QPN:
        message, transaction = decode_cm_untrusted(packet.payload)
        assert encode_cm(message, transaction) == packet.payload
    return packet


def packets_of(name: str) -> list[Packet]:
    file = VECTORS / f"{name}.pcap.gz"
    return [decode_transport_untrusted(c.datagram) for c in read_packets(file) if c.by_kernel]


def messages_of(name: str) -> list[CmMessage]:
    return [decode_cm_untrusted(packet.payload)[0] for packet in packets_of(name) if packet.deth is not None]


@pytest.mark.parametrize("file", small_captures(), ids=lambda file: file.name.partition(".")[0])
def test_every_packet_of_the_kernel_in_the_repository(file: Path) -> None:
    packets = [check_kernel_packet(captured) for captured in read_packets(file) if captured.by_kernel]
    assert packets


def test_the_small_captures_have_every_kind_of_packet() -> None:
    packets = [packet for file in small_captures() for packet in packets_of(file.name.partition(".")[0])]
    elsewhere = {opcode for opcode in Opcode if class_of(opcode).service is Service.UC} | {
        Opcode.ATOMIC_WRITE
    }
    assert {packet.opcode for packet in packets} == {*Opcode} - elsewhere, "these meet the kernel in the lab"
    assert {len(packet.payload) & 3 for packet in packets} == {0, 1, 2, 3}
    assert len(packets) == 356


def test_every_packet_of_the_kernel_in_the_large_captures() -> None:
    count = sum(
        1
        for file in LARGE.glob("*.pcap.gz")
        for captured in read_packets(file)
        if captured.by_kernel and check_kernel_packet(captured)
    )
    assert count == 433


def test_one_packet_that_was_sent_with_another_identification_than_its_own() -> None:
    """The kernel dropped it. Read from a UDP socket it would have passed as a packet of another number."""
    file = LARGE / "emu_udp.pcap.gz"
    wrong = [c for c in read_packets(file) if ip_id_of(c.datagram, c.flow) != c.ip_id]
    assert len(wrong) == 1
    with pytest.raises(MalformedPacket) as caught:
        decode_packet_untrusted(wrong[0].datagram, wrong[0].flow, wrong[0].ip_id)
    assert caught.value.cause is Cause.ICRC


# --- what Wireshark says stands in them, field by field ------------------------------


def test_a_connection_request_of_the_kernel() -> None:
    (captured, _) = read_packets(VECTORS / "rdma_rej.pcap.gz")
    assert captured.flow == Flow(TWO, ONE, 55410)
    packet = decode_packet_untrusted(captured.datagram, captured.flow)
    assert packet.opcode is Opcode.UD_SEND_ONLY
    assert (packet.queue_pair, packet.psn, packet.acknowledge) == (GSI_QPN, 23, True)
    assert (packet.solicited, packet.migration, packet.p_key) == (False, False, 0xFFFF)
    assert packet.deth == (GSI_QKEY, GSI_QPN)
    message, transaction = decode_cm_untrusted(packet.payload)
    assert transaction == 0x2_F684_527A
    assert isinstance(message, ConnectRequest)
    assert message == ConnectRequest(
        local_id=0x7A5284F6,
        service_id=0x0000_0000_0106_1387,
        ca_guid=0x505400FFFE00000B,
        queue_pair=0x1A,
        starting_psn=0x756341,
        primary=CmPath(
            bytes(10) + b"\xff\xff" + TWO,
            bytes(10) + b"\xff\xff" + ONE,
            flow_label=0xC7011,
            local_ack_timeout=19,
        ),
        path_mtu=3,
        responder_resources=0x80,
        initiator_depth=0,
        retry_count=7,
        rnr_retry_count=7,
        remote_response_timeout=20,
        local_response_timeout=20,
        max_cm_retries=15,
        alternate=NO_PATH,
        private_data=message.private_data,
    )
    assert port_of(message.service_id) == (PortSpace.TCP, 4999)
    assert decode_ip_cm_untrusted(message.private_data) == IpCmHeader(TWO, ONE, 0xEA36)
    # The consumer's part: the request of the NVMe/RDMA binding (record 0, queue 0, sizes 32 and 31).
    assert message.private_data[36:44] == bytes.fromhex("0000000020001f00")


def test_a_rejection_by_the_kernel() -> None:
    _, rejection = messages_of("rdma_rej")
    assert isinstance(rejection, ConnectReject)
    assert rejection.local_id == 0
    assert rejection.remote_id == 0x7A5284F6
    assert rejection.message == MessageKind.REQ
    assert rejection.reason is RejectReason.INVALID_SERVICE_ID
    assert rejection.information == b""


def test_a_connection_of_the_kernel_from_request_to_disconnect() -> None:
    request, reply, ready, disconnect, gone = messages_of("rping")
    assert isinstance(request, ConnectRequest)
    assert isinstance(reply, ConnectReply)
    assert (reply.remote_id, reply.queue_pair, reply.rnr_retry_count) == (request.local_id, 0x15, 7)
    assert (reply.ca_guid, reply.target_ack_delay) == (0x505400FFFE00000A, 15)
    assert (reply.responder_resources, reply.initiator_depth, reply.end_to_end_flow_control) == (1, 1, False)
    assert isinstance(ready, ReadyToUse)
    assert (ready.local_id, ready.remote_id) == (request.local_id, reply.local_id)
    assert isinstance(disconnect, DisconnectRequest)
    assert disconnect.remote_queue_pair == reply.queue_pair
    assert isinstance(gone, DisconnectReply)
    assert (gone.local_id, gone.remote_id) == (reply.local_id, request.local_id)
    # What each side announces is what the other begins with.
    first_send = next(packet for packet in packets_of("rping") if packet.opcode is Opcode.SEND_ONLY)
    assert first_send.psn == reply.starting_psn


def test_atomic_operations_of_the_kernel() -> None:
    first, answer = packets_of("ib_atomic_bw")[:2]
    assert first.opcode is Opcode.FETCH_ADD
    assert isinstance(first.atomic, AtomicEth)
    assert (first.atomic.swap_or_add, first.atomic.compare) == (1, 0)
    assert answer.opcode is Opcode.ATOMIC_ACKNOWLEDGE
    assert answer.psn == first.psn
    assert isinstance(answer.aeth, Aeth)
    assert answer.aeth.kind is AethKind.ACK
    assert answer.original is not None


def test_a_negative_acknowledgement_of_the_kernel() -> None:
    read, nak = [p for p in packets_of("pv_nvme") if p.opcode in (Opcode.READ_REQUEST, Opcode.ACKNOWLEDGE)][
        1:
    ]
    assert isinstance(read.reth, Reth)
    assert read.reth.length == 1024
    assert isinstance(nak.aeth, Aeth)
    assert nak.aeth.kind is AethKind.NAK
    assert nak.aeth.code == NakCode.INVALID_REQUEST
    assert nak.psn == read.psn


@pytest.mark.parametrize("name", ["kernel_ipv4", "kernel_ipv6"])
def test_refusals_of_the_kernel_and_psns_that_wrap(name: str) -> None:
    packets = packets_of(name)
    answers = [packet.aeth for packet in packets if packet.opcode is Opcode.ACKNOWLEDGE and packet.aeth]
    refusals = [(aeth.kind, aeth.code) for aeth in answers if aeth.kind is not AethKind.ACK]
    assert refusals == [
        (AethKind.RNR_NAK, 5),
        (AethKind.NAK, NakCode.PSN_SEQUENCE_ERROR),
        (AethKind.NAK, NakCode.REMOTE_ACCESS_ERROR),
    ]
    requests = [packet for packet in packets if class_of(packet.opcode).request and packet.deth is None]
    assert requests[0].psn == 0xFFFFF8
    assert all(psn_difference(b.psn, a.psn) == 1 for a, b in pairwise(requests))
    assert requests[-1].psn < 0x100
    immediate = next(packet for packet in packets if packet.opcode is Opcode.WRITE_ONLY_WITH_IMMEDIATE)
    assert immediate.reth == Reth(0x0123456789ABCDE8, 0xDEADBEEF, 6)
    assert immediate.payload == b"f" * 6
    swap = next(packet for packet in packets if packet.opcode is Opcode.COMPARE_SWAP)
    assert swap.atomic == AtomicEth(
        0x0123456789ABCDE8, 0xDEADBEEF, swap_or_add=0x2222222222222222, compare=0x1111111111111111
    )
