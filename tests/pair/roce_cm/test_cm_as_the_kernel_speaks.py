"""Our connection manager in the place of either kernel of a captured conversation.

What the one kernel sent is given to ours, in order and to the byte; what ours sends instead of the other is
compared with what that one said. IDs, queue pairs and PSNs are taken from the capture.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from emulator.roce.cm.attributes import queue_pair_attributes
from emulator.roce.cm.connection import CmEvent, Connection
from emulator.roce.cm.events import CmEventType, ConnectionParameters
from emulator.roce.cm.limits import ACK_DELAY_EXPONENT, CmTimes
from emulator.roce.cm.manager import ConnectionManager
from emulator.roce.cm.states import CmState
from emulator.roce.nic.verbs import Mtu, QpState
from emulator.roce.wire.cm_ip import PortSpace, decode_ip_cm_untrusted, port_of
from emulator.roce.wire.cm_messages import (
    CmMessage,
    ConnectReject,
    ConnectReply,
    ConnectRequest,
    DisconnectReply,
    DisconnectRequest,
    ReadyToUse,
    decode_cm_untrusted,
)
from emulator.roce.wire.flow import text_address
from tests.support.roce.captures import VECTORS, read_packets

MAD = slice(20, 276)
"""In a UDP payload, after BTH and DETH."""

CONVERSATIONS = ["pv_nvme", "rdma_discover", "rping"]
LINUX_TIMES = CmTimes(response_exponent=20, tries=15, ack_exponent=19)


class Said:
    """The CM messages of a capture, each with who sent it and its bytes."""

    def __init__(self, name: str) -> None:
        self.mads: list[tuple[str, bytes]] = []
        for packet in read_packets(Path(VECTORS / f"{name}.pcap.gz")):
            if packet.datagram[0] == 0x64 and packet.datagram[5:8] == b"\0\0\1":
                self.mads.append((text_address(packet.flow.source), packet.datagram[MAD]))
        self.host = self.mads[0][0]
        self.target = next(ip for ip, _ in self.mads if ip != self.host)

    def first(self, kind: type[CmMessage], ip: str) -> tuple[CmMessage, bytes]:
        for sender, raw in self.mads:
            message, _ = decode_cm_untrusted(raw)
            if isinstance(message, kind) and sender == ip:
                return message, raw
        raise AssertionError(f"no {kind.__name__} of {ip} in the capture")


def manager_at(ip: str, local_id: int, guid: int) -> ConnectionManager:
    manager = ConnectionManager(ip, guid, random.Random(0), mtu=Mtu.MTU_1024, times=LINUX_TIMES)
    manager._unused_id = lambda: local_id  # type: ignore[method-assign]
    return manager


def output(manager: ConnectionManager) -> list[tuple[CmMessage, int]]:
    return [decode_cm_untrusted(mad) for _, mad in manager.take_output()]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_in_the_place_of_the_target(name: str) -> None:
    said = Said(name)
    request, request_raw = said.first(ConnectRequest, said.host)
    reply, reply_raw = said.first(ConnectReply, said.target)
    assert isinstance(request, ConnectRequest)
    assert isinstance(reply, ConnectReply)
    manager = manager_at(said.target, reply.local_id, reply.ca_guid)
    events: list[CmEvent] = []
    where = port_of(request.service_id)
    assert where is not None
    manager.listen(*where, events.append)

    manager.receive(request_raw, said.host, 0.0)
    event = events.pop()
    assert event.type is CmEventType.CONNECT_REQUEST
    assert event.private_data == request.private_data[36:]
    connection = event.connection
    assert connection.remote_port == decode_ip_cm_untrusted(request.private_data).source_port
    connection.rq_psn = reply.starting_psn
    connection.accept(
        ConnectionParameters(
            reply.queue_pair, reply.private_data, reply.responder_resources, reply.initiator_depth,
            flow_control=reply.end_to_end_flow_control, rnr_retry_count=reply.rnr_retry_count,
            srq=reply.srq,
        ),
        0.0,
    )  # fmt: skip
    ((ours, transaction),) = output(manager)
    theirs, their_transaction = decode_cm_untrusted(reply_raw)
    assert transaction == their_transaction
    assert isinstance(theirs, ConnectReply)
    # Each has a target ACK delay of its own; everything else is the same to the bit.
    assert ours == replace(theirs, target_ack_delay=ACK_DELAY_EXPONENT)

    ready, _ = queue_pair_attributes(connection, QpState.RTR)
    sending, _ = queue_pair_attributes(connection, QpState.RTS)
    assert (ready.dest_qpn, sending.sq_psn) == (request.queue_pair, request.starting_psn)
    assert (ready.path_mtu, sending.timeout) == (Mtu.MTU_1024, 19)

    manager.receive(said.first(ReadyToUse, said.host)[1], said.host, 0.0)
    assert events.pop().type is CmEventType.ESTABLISHED
    if name == "pv_nvme":
        # Here it was the target that ended it.
        connection.disconnect(0.0)
        (asked,) = output(manager)
        expected, _ = said.first(DisconnectRequest, said.target)
        assert asked[0] == expected
        manager.receive(said.first(DisconnectReply, said.host)[1], said.host, 0.0)
    else:
        _, raw = said.first(DisconnectRequest, said.host)
        manager.receive(raw, said.host, 0.0)
        assert output(manager) == [decode_cm_untrusted(said.first(DisconnectReply, said.target)[1])]
    assert events.pop().type is CmEventType.DISCONNECTED
    assert connection.state is CmState.TIME_WAIT


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_in_the_place_of_the_host(name: str) -> None:
    said = Said(name)
    request, _ = said.first(ConnectRequest, said.host)
    reply, reply_raw = said.first(ConnectReply, said.target)
    assert isinstance(request, ConnectRequest)
    assert isinstance(reply, ConnectReply)
    manager = manager_at(said.host, request.local_id, request.ca_guid)
    events: list[CmEvent] = []
    connection = _asked_as(manager, request, said.target, events)
    ((ours, _),) = output(manager)
    assert isinstance(ours, ConnectRequest)
    # Flow label and packet rate are the kernel's own choice, and so is the flow control that nobody does.
    theirs = replace(
        request,
        primary=replace(request.primary, flow_label=0, packet_rate=0),
        end_to_end_flow_control=ours.end_to_end_flow_control,
    )
    assert ours == theirs

    manager.receive(reply_raw, said.target, 0.0)
    event = events.pop()
    assert event.type is CmEventType.CONNECT_RESPONSE
    assert event.private_data == reply.private_data
    assert (connection.remote_qpn, connection.sq_psn) == (reply.queue_pair, reply.starting_psn)
    connection.establish(0.0)
    ((ready, _),) = output(manager)
    assert ready == said.first(ReadyToUse, said.host)[0]


def test_in_the_place_of_a_host_that_is_rejected() -> None:
    said = Said("rdma_rej")
    request, request_raw = said.first(ConnectRequest, said.host)
    assert isinstance(request, ConnectRequest)
    manager = manager_at(said.host, request.local_id, request.ca_guid)
    events: list[CmEvent] = []
    _asked_as(manager, request, said.target, events)
    rejection, raw = said.first(ConnectReject, said.target)
    manager.receive(raw, said.target, 0.0)
    assert isinstance(rejection, ConnectReject)
    assert (events[-1].type, events[-1].status) == (CmEventType.REJECTED, 8)

    # And in the place of the target, where nobody listens: the same words.
    target = manager_at(said.target, 1, 2)
    target.receive(request_raw, said.host, 0.0)
    assert output(target) == [decode_cm_untrusted(raw)]


def _asked_as(
    manager: ConnectionManager, request: ConnectRequest, target: str, events: list[CmEvent]
) -> Connection:
    """The request that a kernel made, made by us."""
    where = port_of(request.service_id)
    assert where is not None
    connection = manager.create(events.append)
    connection.resolve_address(target, where[1], PortSpace.TCP)
    connection.rq_psn = request.starting_psn
    connection.local_port = decode_ip_cm_untrusted(request.private_data).source_port
    connection.connect(
        ConnectionParameters(
            request.queue_pair, request.private_data[36:], request.responder_resources,
            request.initiator_depth, retry_count=request.retry_count,
            rnr_retry_count=request.rnr_retry_count, srq=request.srq,
        ),
        0.0,
    )  # fmt: skip
    return connection
