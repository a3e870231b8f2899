"""Events of a connector: told once, in order, bounded, and what is lost is counted."""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

from host_shim import kv_events
from host_shim.kv_events import EventStream, KvEvents, Told, ZmqPublisher
from tests.support.waiting import wait_until


def all_of(events: KvEvents) -> tuple[list[Told], int]:
    return events.take(1 << 20)


def test_a_block_is_told_of_once_and_as_gone_only_where_it_was_told_of() -> None:
    events = KvEvents()
    events.stored([1, 2])
    events.stored([2, 3])
    events.gone([9, 2])
    events.gone([2])
    events.stored([2])
    assert all_of(events) == ([Told(False, [1, 2, 3]), Told(True, [2]), Told(False, [2])], 0)
    assert all_of(events) == ([], 0)


def test_beyond_its_bound_events_are_lost_and_counted() -> None:
    events = KvEvents(waiting_max=5)
    events.stored(range(8))
    assert (len(events), events.lost, events.count) == (5, 3, 5)
    assert all_of(events) == ([Told(False, [0, 1, 2, 3, 4])], 3)
    events.gone([7])
    assert all_of(events) == ([Told(True, [7])], 0), (
        "what was lost is known as told: the index is mended by it"
    )


def test_the_memory_of_what_was_told_is_bounded() -> None:
    events = KvEvents(known_max=3)
    events.stored(range(10))
    events.gone(range(10))
    assert all_of(events)[0] == [Told(False, list(range(10))), Told(True, [7, 8, 9])]


def test_what_is_taken_at_a_time_is_bounded_and_in_order() -> None:
    events = KvEvents()
    events.stored(range(10))
    assert [events.take(4)[0] for _ in range(4)] == [
        [Told(False, [0, 1, 2, 3])], [Told(False, [4, 5, 6, 7])], [Told(False, [8, 9])], [],
    ]  # fmt: skip


class Kept:
    """A publisher that a test holds, or that fails."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.numbers: list[int] = []
        self.number = 0
        self.free = threading.Event()
        self.free.set()
        self.closed = False
        self.fails = 0

    def publish(self, told: Sequence[Told]) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError("no")
        self.free.wait(30)
        self.numbers.append(self.number)
        self.number += 1
        self.told += told

    def skip(self, count: int) -> None:
        self.number += count

    def close(self) -> None:
        self.closed = True


def test_a_stream_hands_events_on_and_ends_with_what_waits() -> None:
    events, kept = KvEvents(), Kept()
    stream = EventStream(events, kept, gather_seconds=0.0)
    events.stored([1])
    wait_until(lambda: kept.told, 10, "the event")
    events.gone([1])
    stream.close()
    assert kept.told == [Told(False, [1]), Told(True, [1])]
    assert kept.closed


def test_a_publisher_that_holds_the_stream_costs_events_and_their_number_is_left_out() -> None:
    events, kept = KvEvents(waiting_max=10), Kept()
    stream = EventStream(events, kept, gather_seconds=0.0)
    kept.free.clear()
    events.stored(["first"])
    wait_until(lambda: not len(events), 10, "the stream has it")
    events.stored(range(25))  # by no means does it wait
    assert events.lost == 15
    kept.free.set()
    wait_until(lambda: len(kept.told) == 2, 10, "all that there was room for")
    stream.close()
    assert kept.told == [Told(False, ["first"]), Told(False, list(range(10)))]
    assert kept.numbers == [0, 16]


def test_calls_that_nobody_has_looked_at_are_bounded_in_number_and_in_blocks() -> None:
    events = KvEvents(waiting_max=1000)
    events.stored(range(kv_events.NOTED_MAX))
    assert not events._noted
    for number in range(1, 5001):
        events.stored([-number])
        assert len(events._noted) < kv_events.NOTED_MAX
    assert (len(events), events.lost) == (1000, kv_events.NOTED_MAX + 5000 - 1000)
    assert all_of(events)[0][0].keys[kv_events.NOTED_MAX + 5] == -6


def test_events_of_threads_that_tell_while_others_are_taken_all_arrive() -> None:
    events, kept = KvEvents(), Kept()
    stream = EventStream(events, kept, gather_seconds=0.0)

    def tell(first: int) -> None:
        for number in range(first, first + 2000):
            events.stored([number])

    tellers = [threading.Thread(target=tell, args=(at * 2000,)) for at in range(3)]
    for teller in tellers:
        teller.start()
    for teller in tellers:
        teller.join()
    wait_until(lambda: sum(len(each.keys) for each in kept.told) == 6000, 10, "all events, before the close")
    stream.close()
    assert sorted(key for each in kept.told for key in each.keys) == list(range(6000))
    assert (events.count, events.lost) == (6000, 0)


def test_more_than_one_message_has_room_for_does_not_wait_to_be_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[int] = []
    events, kept = KvEvents(), Kept()
    monkeypatch.setattr(EventStream, "_pause", lambda stream: pauses.append(len(kept.told)))
    events.stored(range(3 * kv_events.BATCH_MAX + 1))
    stream = EventStream(events, kept)
    wait_until(lambda: len(kept.told) == 4, 10, "four messages")
    stream.close()
    assert [len(each.keys) for each in kept.told] == [kv_events.BATCH_MAX] * 3 + [1]
    assert set(pauses) <= {0, 4}


@pytest.mark.expects_log("could not be published")
def test_a_publisher_that_fails_is_logged_seldom_and_the_stream_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, kept = KvEvents(), Kept()
    kept.fails = 3
    stream = EventStream(events, kept, gather_seconds=0.0)
    for number in range(4):
        events.stored([number])
        wait_until(lambda: not len(events), 10, "it was taken")
    wait_until(lambda: kept.told, 10, "the last")
    stream.close()
    assert kept.told[-1].keys[-1] == 3
    assert [record.message for record in caplog.records] == [
        "events of the g35 connector could not be published"
    ]
    caplog.clear()


def test_without_the_packages_of_a_publisher_the_engine_is_told_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> ModuleType:
        raise ImportError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(kv_events.importlib, "import_module", absent)
    with pytest.raises(ValueError, match=r"want the package zmq, .* install pyzmq and msgspec"):
        ZmqPublisher("tcp://*:0")


@pytest.fixture
def zmq() -> Any:
    return importlib.import_module("zmq")


def subscriber(zmq: Any, address: str, hwm: int = 1000) -> Any:
    made = zmq.Context.instance().socket(zmq.SUB)
    made.set_hwm(hwm)
    made.setsockopt(zmq.SUBSCRIBE, b"kv")
    made.setsockopt(zmq.RCVTIMEO, 10_000)
    made.connect(address)
    return made


def test_messages_have_the_form_of_vllms_publisher(zmq: Any) -> None:
    msgspec = importlib.import_module("msgspec")
    publisher = ZmqPublisher("inproc://g35-form", "kv", block_size=256, wall=lambda: 12.5)
    reader = subscriber(zmq, "inproc://g35-form")
    try:
        publisher.publish([Told(False, [b"a" * 32, b"b" * 32]), Told(True, [b"c" * 32])])
        topic, number, payload = reader.recv_multipart()
        assert (topic, int.from_bytes(number, "big")) == (b"kv", 0)
        assert msgspec.msgpack.decode(payload) == [
            12.5,
            [
                {
                    "type": "BlockStored", "block_hashes": [b"a" * 32, b"b" * 32], "parent_block_hash": None,
                    "token_ids": [], "block_size": 256, "lora_id": None, "medium": "STORAGE",
                    "lora_name": None,
                },
                {"type": "BlockRemoved", "block_hashes": [b"c" * 32], "medium": "STORAGE"},
            ],
            0,
        ]  # fmt: skip
        publisher.skip(7)
        publisher.publish([Told(True, [b"d" * 32])])
        assert int.from_bytes(reader.recv_multipart()[1], "big") == 8
    finally:
        reader.close(0)
        publisher.close()


def test_a_subscriber_that_stops_reading_loses_messages_and_sees_how_many(zmq: Any) -> None:
    publisher = ZmqPublisher("inproc://g35-slow", "kv", hwm=10)
    reader = subscriber(zmq, "inproc://g35-slow", hwm=10)
    try:
        for number in range(1000):  # nobody reads, and nobody waits
            publisher.publish([Told(False, [number])])
        numbers = [int.from_bytes(reader.recv_multipart()[1], "big") for _ in range(20)]
        assert numbers == list(range(20))

        def read_on() -> bool:  # the socket hears of the new room with one of its next messages
            publisher.publish([Told(False, [1000])])
            return bool(reader.poll(10))

        wait_until(read_on, 10, "a message")
        assert int.from_bytes(reader.recv_multipart()[1], "big") >= 1000
    finally:
        reader.close(0)
        publisher.close()


@pytest.mark.expects_log("nobody is at")
def test_a_publisher_that_connects_to_nobody_says_so_once(
    zmq: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    publisher = ZmqPublisher(f"tcp://127.0.0.1:{port}", "kv")
    try:
        publisher.publish([Told(False, [1])])
        assert not caplog.records, "somebody may still come"
        monkeypatch.setattr(kv_events, "NOBODY_SECONDS", 0.0)
        for _ in range(3):
            publisher.publish([Told(False, [1])])
        (record,) = caplog.records
        assert "give a wildcard, such as tcp://*:5558" in record.message
        caplog.clear()
    finally:
        publisher.close()


def test_a_publisher_that_connects_to_somebody_says_nothing(
    zmq: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = zmq.Context.instance().socket(zmq.SUB)
    reader.setsockopt(zmq.SUBSCRIBE, b"kv")
    port = reader.bind_to_random_port("tcp://127.0.0.1")
    publisher = ZmqPublisher(f"tcp://127.0.0.1:{port}", "kv")
    try:

        def came() -> bool:
            publisher.publish([Told(False, [1])])
            return bool(reader.poll(10))

        wait_until(came, 9, "a message")  # within NOBODY_SECONDS
        monkeypatch.setattr(kv_events, "NOBODY_SECONDS", 0.0)
        publisher.publish([Told(False, [1])])
        assert not caplog.records
    finally:
        reader.close(0)
        publisher.close()


def test_an_address_that_is_taken_is_said(zmq: Any) -> None:
    publisher = ZmqPublisher("inproc://g35-taken")
    try:
        with pytest.raises(ValueError, match="cannot be published at inproc://g35-taken"):
            ZmqPublisher("inproc://g35-taken")
    finally:
        publisher.close()
