"""Two emulated RDMA devices on a bad network, in virtual time: every request is carried out once, in order.

Each seed is a conversation of its own (`tests/support/roce/script.py`); a seed that fails is named, and
`Conversation(seed, weather, ...).run()` repeats it exactly.
"""

from __future__ import annotations

from collections import Counter

import pytest

from emulator.roce.nic.counters import Count
from emulator.roce.nic.verbs import EventType, Mtu, QpState, SendOpcode, WcStatus
from tests.support.roce.ends import Pair
from tests.support.roce.script import Conversation
from tests.support.roce.weather import STORM, Weather

GUSTS = Weather(loss=0.005, duplicate=0.01, corrupt=0.005, reorder=0.01, reorder_s=200e-6)
"""Mild enough that most packets come in rows, and every kind of trouble still happens to some."""


def _run_all(seeds: range, weather: Weather, **how: object) -> Counter[str]:
    """Run the seeds, and say which failed. Returns what the devices counted."""
    failures: list[str] = []
    counted: Counter[str] = Counter()
    for seed in seeds:
        conversation = Conversation(seed, weather, **how)  # type: ignore[arg-type]
        try:
            conversation.run()
        except AssertionError as error:
            failures.append(f"seed {seed}: {str(error)[:300]}")
        for direction in conversation.directions:
            counted.update(direction.end.nic.counters)
    assert not failures, "\n".join([f"{len(failures)} of {len(seeds)} seeds failed, {how}:", *failures[:10]])
    return counted


# Parts differ in their seeds alone.
@pytest.mark.parametrize("part", [0, *(pytest.param(each, marks=pytest.mark.nightly) for each in (1, 2, 3))])
def test_short_conversations_in_a_storm(seed: int, part: int) -> None:
    first = seed * 1000 + part * 400
    counted = _run_all(range(first, first + 400), STORM)
    for cause in (Count.DUPLICATE, Count.OUT_OF_SEQUENCE, Count.PROBES, Count.LOST_RESPONSE, "icrc"):
        assert counted[cause], f"{cause} never happened: the weather is too good to prove anything"


@pytest.mark.parametrize("numbered", [False, True])
def test_long_messages_in_rows_through_gusts(seed: int, numbered: bool) -> None:
    counted = _run_all(
        range(seed * 1000, seed * 1000 + 250),
        GUSTS,
        longest=4000,
        mtu=Mtu.MTU_256,
        window_bytes=12 << 10,
        parted=False,
        requests=7,
        numbered=numbered,
    )
    assert counted[Count.ROW_PACKETS] > counted[Count.PACKETS_IN] / 5
    assert counted[Count.OUT_OF_SEQUENCE]
    assert counted[Count.LOST_RESPONSE]


@pytest.mark.parametrize("loss", [0.01, 0.05])
def test_a_long_message_survives_loss(loss: float) -> None:
    size = 1 << 20
    pair = Pair(2 * size, weather=Weather(loss=loss), seed=7)
    a, b = pair.a, pair.b
    a.memory.view[:size] = bytes(range(256)) * (size // 256)
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, size), to=b)
    a.post(SendOpcode.RDMA_READ, a.sge(size, size), to=b)
    assert [c.status for c in pair.run_until(2)] == [WcStatus.SUCCESS] * 2
    assert b.memory.view[:size] == a.memory.view[:size] == a.memory.view[size:]


@pytest.mark.parametrize("opcode", [SendOpcode.RDMA_WRITE, SendOpcode.RDMA_READ, SendOpcode.SEND])
def test_a_vanished_peer_ends_in_flush_errors_within_the_retry_time(opcode: SendOpcode) -> None:
    pair = Pair(1 << 18, changes={"timeout": 10, "retry_count": 3})
    a, b = pair.a, pair.b
    for number in range(4):
        a.receive(a.sge(0, 16), wr_id=100 + number)
        b.receive(b.sge())
        a.post(opcode, a.sge(0, 100_000), wr_id=number, to=b)
    # What has left still arrives, but nothing comes back any more.
    pair.network.collect()
    pair.network.partition("10.0.0.1", "10.0.0.2")
    pair.run()
    completions = a.polled()
    assert [c.status for c in completions] == [WcStatus.RETRY_EXC_ERR] + [WcStatus.WR_FLUSH_ERR] * 7
    assert [c.wr_id for c in completions] == [0, 1, 2, 3, 100, 101, 102, 103]
    assert a.qp.state is QpState.ERR
    # Four waits of 0.54 s, the least that this device takes: the first try and three more.
    assert pair.network.now == pytest.approx(4 * 4.096e-6 * (1 << 17), rel=0.05)


@pytest.mark.parametrize("opcode", [SendOpcode.RDMA_WRITE, SendOpcode.RDMA_READ, SendOpcode.SEND])
def test_a_peer_that_is_silent_for_three_seconds_is_waited_for(opcode: SendOpcode) -> None:
    """Time-out 14 and seven retries, as every example of the verbs has them: half a second as it is coded."""
    pair = Pair(1 << 16, changes={"timeout": 14, "retry_count": 7})
    a, b = pair.a, pair.b
    b.receive(b.sge())
    pair.network.partition("10.0.0.1", "10.0.0.2")
    a.post(opcode, a.sge(0, 10_000), to=b)
    pair.run(3.0)
    assert not a.polled()
    pair.network.heal()
    assert [c.status for c in pair.run_until(1)] == [WcStatus.SUCCESS]


def test_one_lost_datagram_does_not_cost_the_whole_time_out() -> None:
    pair = Pair(1 << 16, changes={"timeout": 19})
    a, b = pair.a, pair.b
    pair.network.weather = Weather(loss=1.0)
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 3000), to=b)
    pair.network.collect()
    pair.network.weather = Weather()
    assert pair.run_until(1)[0].status is WcStatus.SUCCESS
    assert pair.network.now < 0.05
    assert a.nic.counters[Count.PROBES] == 1
    assert a.nic.counters[Count.TIMEOUTS] == 0


def test_receivers_that_are_late_are_waited_for() -> None:
    pair = Pair(1 << 16, weather=STORM, seed=3, changes={"rnr_retry": 7})
    a, b = pair.a, pair.b
    for number in range(8):
        a.memory.view[number * 16 : number * 16 + 16] = bytes([number]) * 16
        a.post(SendOpcode.SEND, a.sge(number * 16, 16), wr_id=number)
    for number in range(8):
        # Nothing is posted until the device has said that it is missed.
        before = b.nic.counters[Count.RNR_NAK_SENT]
        assert pair.network.run(lambda seen=before: b.nic.counters[Count.RNR_NAK_SENT] > seen)
        b.receive(b.sge(number * 16, 16), wr_id=number)
    assert pair.network.run(lambda: len(a.cq) == 8 and len(b.cq) == 8)
    assert [c.wr_id for c in b.polled()] == list(range(8))
    assert b.memory.view[:128] == a.memory.view[:128]


def test_a_receiver_that_never_is_ready_ends_the_connection() -> None:
    pair = Pair(1 << 12, changes={"rnr_retry": 2, "min_rnr_timer": 20})
    a = pair.a
    a.post(SendOpcode.SEND, a.sge(0, 16))
    pair.run()
    assert [c.status for c in a.polled()] == [WcStatus.RNR_RETRY_EXC_ERR]
    assert a.nic.counters[Count.RNR_NAK_RECEIVED] == 3
    # Code 20 is 10.24 ms, waited for twice (IBTA table 46).
    assert pair.network.now == pytest.approx(2 * 10.24e-3, rel=0.02)
    assert EventType.QP_FATAL not in {event.type for event in a.nic.async_events}
