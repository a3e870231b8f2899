"""What the front-end says to a device, message by message, against what QEMU 7.2 said to virtiofsd."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from agent.bench.virtio_driver.front_end import BackEndFault, Conversation, FrontEnd, Incoming, Outgoing
from agent.bench.virtio_driver.guest_memory import GuestMemory
from agent.bench.virtio_driver.request_queue import RequestQueue
from agent.virtio.vhost_user import (
    REPLIES,
    U64,
    Header,
    InflightArea,
    ProtocolFeature,
    Region,
    Request,
    VringAddress,
    VringState,
    decode_payload_untrusted,
)

VIRTIOFSD_FEATURES = 0x1_7500_0000
VIRTIOFSD_PROTOCOL = 0x8C2B

AGREEING = ["GET_FEATURES", "GET_PROTOCOL_FEATURES", "SET_PROTOCOL_FEATURES", "GET_QUEUE_NUM"]
SHARING = ["SET_FEATURES", "ADD_MEM_REG", "ADD_MEM_REG"]
A_RING = ["SET_VRING_NUM", "SET_VRING_BASE", "SET_VRING_ADDR", "SET_VRING_CALL", "SET_VRING_KICK"]
QEMU_SAID = [
    *AGREEING,
    *("GET_MAX_MEM_SLOTS", "SET_OWNER"),
    *("SET_VRING_CALL", "SET_VRING_ERR") * 2,
    *SHARING,
    *A_RING * 2,
    *("SET_VRING_ENABLE",) * 2,
]
"""The captured order, but that QEMU says SET_VRING_CALL again at other places, asks GET_FEATURES twice, and
says SET_BACKEND_REQ_FD, for requests of the device that ours does not make."""


class Setting:
    def __init__(self) -> None:
        self.memory = GuestMemory(1 << 16, 1 << 16)
        self.queues = [RequestQueue(self.memory, index, 16, first=5) for index in range(2)]
        self.front_end = FrontEnd(self.memory, self.queues)

    def close(self) -> None:
        self.front_end.close()
        for queue in self.queues:
            queue.close()
        self.memory.close()


@pytest.fixture
def setting() -> Iterator[Setting]:
    made = Setting()
    yield made
    made.close()


def played(
    conversation: Conversation[object], features: int = VIRTIOFSD_FEATURES, protocol: int = VIRTIOFSD_PROTOCOL
) -> list[Outgoing]:
    """What is said to a back-end that offers this and agrees to everything."""
    said: list[Outgoing] = []
    answer: Incoming | None = None
    while True:
        try:
            message = conversation.send(answer)
        except StopIteration:
            return said
        said.append(message)
        values = {
            Request.GET_FEATURES: features,
            Request.GET_PROTOCOL_FEATURES: protocol,
            Request.GET_QUEUE_NUM: 2,
            Request.GET_MAX_MEM_SLOTS: 32,
        }
        if message.request is Request.GET_VRING_BASE:
            index = VringState.decode_untrusted(message.payload).index
            answer = Incoming(VringState(index, 7 + index))
        elif message.request is Request.GET_INFLIGHT_FD:
            answer = Incoming(InflightArea(640, 0, 2, 16), (os.memfd_create("area"),))
        else:
            answer = Incoming(U64(values.get(message.request, 0))) if message.is_answered else None


def test_the_order_is_that_of_qemu(setting: Setting) -> None:
    said = played(setting.front_end.starting())
    assert [each.request.name for each in said] == QEMU_SAID
    for each in said:
        header = Header.decode_untrusted(each.encode())
        assert header.size == len(each.payload)
        assert header.needs_reply is each.need_reply
        decode_payload_untrusted(each.request, each.payload)
    by_name = {each.request: each for each in said}
    assert by_name[Request.SET_FEATURES].payload == U64(0x1_7000_0000).encode()  # what QEMU accepted
    assert by_name[Request.ADD_MEM_REG].need_reply
    assert {each.request for each in said if each.is_answered} & set(REPLIES)


def test_rings_are_named_by_user_addresses_and_memory_by_both(setting: Setting) -> None:
    said = played(setting.front_end.starting())
    regions = [
        Region.decode_untrusted(each.payload[8:]) for each in said if each.request is Request.ADD_MEM_REG
    ]
    assert [region.guest_address for region in regions] == [
        region.guest_address for region in setting.memory.regions
    ]
    ring = setting.queues[1].ring
    places = [
        VringAddress.decode_untrusted(each.payload) for each in said if each.request is Request.SET_VRING_ADDR
    ][1]
    shift = regions[0].user_address - regions[0].guest_address
    assert shift
    assert (places.descriptors, places.available, places.used) == (
        ring.table.address + shift,
        ring.available.address + shift,
        ring.used.address + shift,
    )
    assert ring.event_index
    assert ring.indirect


def test_a_small_back_end_gets_one_memory_table_and_no_acknowledgements(setting: Setting) -> None:
    said = played(setting.front_end.starting(), 0x1_4000_0000, ProtocolFeature.MQ)
    names = [each.request.name for each in said]
    assert "ADD_MEM_REG" not in names
    assert not any(each.need_reply for each in said)
    table = next(each for each in said if each.request is Request.SET_MEM_TABLE)
    assert table.descriptors == tuple(region.descriptor for region in setting.memory.regions)
    assert not setting.queues[1].ring.event_index
    assert not setting.queues[1].ring.indirect


def bases(said: list[Outgoing]) -> list[int]:
    return [
        VringState.decode_untrusted(each.payload).number
        for each in said
        if each.request is Request.SET_VRING_BASE
    ]


def test_where_rings_begin(setting: Setting) -> None:
    """At their first number; after a stop where the device was; after its death where the used ring is."""
    front_end = setting.front_end
    assert bases(played(front_end.starting())) == [5, 5]
    stopped = played(front_end.stopping())
    assert [each.request.name for each in stopped] == ["SET_VRING_ENABLE"] * 2 + ["GET_VRING_BASE"] * 2
    assert bases(played(front_end.starting())) == [7, 8]
    assert bases(played(front_end.starting())) == [5, 5]


def test_the_inflight_area_is_asked_for_once_and_kept(setting: Setting) -> None:
    protocol = VIRTIOFSD_PROTOCOL | ProtocolFeature.INFLIGHT_SHMFD
    first = [each.request for each in played(setting.front_end.starting(), protocol=protocol)]
    assert first.count(Request.GET_INFLIGHT_FD) == first.count(Request.SET_INFLIGHT_FD) == 1
    again = played(setting.front_end.starting(), protocol=protocol)
    assert setting.front_end.inflight is not None
    area, descriptor = setting.front_end.inflight
    told = [each for each in again if each.request is Request.SET_INFLIGHT_FD]
    assert [(each.payload, each.descriptors) for each in told] == [(area.encode(), (descriptor,))]
    assert Request.GET_INFLIGHT_FD not in [each.request for each in again]


@pytest.mark.parametrize("features", [0x4000_0000, 0x1_0000_0000])
def test_back_ends_that_offer_too_little(setting: Setting, features: int) -> None:
    with pytest.raises(BackEndFault, match="offers features"):
        played(setting.front_end.starting(), features)
