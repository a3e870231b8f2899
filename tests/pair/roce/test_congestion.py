"""Congestion control between NICs: marks become CNPs, CNPs become pauses, and by default nothing does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from emulator.roce.nic.congestion import CongestionSettings
from emulator.roce.nic.counters import Count
from emulator.roce.nic.verbs import Address, Burst, QpState, QpType, SendOpcode
from emulator.roce.wire.cnp import Cnp, decode_cnp_untrusted, is_cnp_untrusted
from emulator.roce.wire.flow import flow_of
from emulator.roce.wire.malformed import Cause
from emulator.roce.wire.opcodes import Opcode
from tests.support.roce.ends import End, Pair
from tests.support.roce.incast import Incast, paced
from tests.support.roce.memory_network import output_of
from tests.support.roce.packets import check_icrc_untrusted, decode_packet_untrusted
from tests.support.roce.switch import Switch
from tests.support.roce.weather import Weather

LINE = 1.25e9
SETTINGS = CongestionSettings(LINE)
FORTH = flow_of("10.0.0.1", "10.0.0.2", 4791)
BACK = flow_of("10.0.0.2", "10.0.0.1", 4791)
HERE, THERE = Address("10.0.0.1"), Address("10.0.0.2")


def control(pair: Pair, settings: CongestionSettings | None = SETTINGS) -> Pair:
    for end in (pair.a, pair.b):
        end.nic.control_congestion(settings)
    return pair


def written(pair: Pair, size: int, now: float = 0.0) -> list[Burst]:
    """The packets of an RDMA WRITE from `a`, as its port sends them from `now` on."""
    pair.a.post(SendOpcode.RDMA_WRITE, pair.a.sge(0, size), to=pair.b)
    bursts = []
    while True:
        bursts += output_of(pair.a.nic, now)
        due = pair.a.nic.deadline()
        if due is None or due > now + 1e-3:
            return bursts
        now = due
        pair.a.nic.advance(now)


def hear(end: End, bursts: list[Burst], source: Address, now: float, *, marked: bool) -> list[Burst]:
    """Its answers to packets that arrive at one moment."""
    for burst in bursts:
        end.nic.receive(burst.data, burst.segment_size, source, now, "", marked)
    return output_of(end.nic, now)


def notices(bursts: list[Burst]) -> list[Cnp]:
    return [decode_cnp_untrusted(burst.data) for burst in bursts if is_cnp_untrusted(burst.data)]


@pytest.mark.parametrize("size", [100, 20_000])
def test_a_mark_becomes_a_notification_for_the_sender(size: int) -> None:
    """Whether it arrived in a row or by itself."""
    pair = control(Pair(1 << 16))
    bursts = written(pair, size)
    answers = hear(pair.b, bursts, HERE, 0.0, marked=True)
    first = answers[0]
    assert bytes(first.data) == Cnp(pair.a.qp.number, 0xFFFF).encode(BACK)
    assert first.destination == HERE
    check_icrc_untrusted(first.data, BACK, 0)
    assert len(notices(answers)) == 1
    counters = pair.b.nic.counters
    assert counters[Count.CE_IN] == counters[Count.PACKETS_IN] == -(-size // 1024)
    assert counters[Count.CNP_SENT] == 1


def test_a_connection_causes_one_in_an_interval() -> None:
    pair = control(Pair(1 << 16))
    times = [0.0, 10e-6, 49e-6, 51e-6, 60e-6, 102e-6]
    sent = [len(notices(hear(pair.b, written(pair, 3000), HERE, now, marked=True))) for now in times]
    assert sent == [1, 0, 0, 1, 0, 1]
    assert not notices(hear(pair.b, written(pair, 3000), HERE, 1.0, marked=False))


def test_by_default_marks_and_notifications_mean_nothing() -> None:
    """A notification is then what rxe takes it for: a packet of no transport service, which is dropped."""
    pair = Pair(1 << 16)
    assert not notices(hear(pair.b, written(pair, 20_000), HERE, 0.0, marked=True))
    raw = memoryview(Cnp(pair.a.qp.number, 0xFFFF).encode(BACK))
    assert not hear(pair.a, [Burst(raw, 32, HERE)], THERE, 0.0, marked=False)
    assert pair.a.nic.counters[Cause.OPCODE] == 1
    assert pair.a.qp.limiter is None
    counters = pair.a.nic.counters + pair.b.nic.counters
    assert not any(counters[name] for name in (Count.CE_IN, Count.CNP_SENT, Count.CNP_HANDLED))


def notify(end: End, now: float, *, source: Address = THERE, data: bytes = b"", qpn: int = 0) -> None:
    raw = data or Cnp(qpn or end.qp.number, 0xFFFF).encode(BACK)
    end.nic.receive(memoryview(raw), len(raw), source, now)


def test_who_is_notified_sends_at_half_the_rate_and_recovers() -> None:
    pair = control(Pair(1 << 20, changes={"path_mtu": 5}))
    notify(pair.a, 0.0)
    assert pair.a.nic.counters[Count.CNP_HANDLED] == 1
    limiter = pair.a.qp.limiter
    assert limiter is not None
    assert limiter.rate == LINE / 2
    pair.a.post(SendOpcode.RDMA_WRITE, pair.a.sge(), to=pair.b)
    pair.run_until(1)
    # Half of the line's rate is missing for 55 us, then a quarter, an eighth: 55 us in all.
    assert pair.network.now == pytest.approx((1 << 20) / LINE + 55e-6 + 40e-6, rel=0.03)
    assert pair.b.memory.view == pair.a.memory.view
    limiter.pass_time(pair.network.now + 1.0)
    assert not limiter.limited


def test_the_port_bounds_all_connections_from_the_start() -> None:
    pair = control(Pair(1 << 20, changes={"path_mtu": 5}))
    pair.a.post(SendOpcode.RDMA_WRITE, pair.a.sge(), to=pair.b)
    pair.run_until(1)
    assert pair.network.now == pytest.approx((1 << 20) / LINE, rel=0.1)


def test_the_data_of_a_read_are_paced_and_acknowledgements_are_not() -> None:
    pair = control(Pair(1 << 20, changes={"path_mtu": 5}))
    for _ in range(4):
        notify(pair.a, 0.0)
    assert pair.a.qp.limiter is not None
    assert pair.a.qp.limiter.rate == pytest.approx(LINE / 16, rel=0.05)
    pair.b.post(SendOpcode.RDMA_READ, pair.b.sge(0, 1 << 17), to=pair.a)
    pair.run_until(1, pair.b)
    assert pair.network.now > 3 * (1 << 17) / LINE
    now = pair.network.now
    # While READ data would have to wait, an acknowledgement goes at once.
    for _ in range(9):
        notify(pair.a, now)
    pair.a.qp.limiter.sent(1 << 20, now)
    pair.b.post(SendOpcode.RDMA_WRITE, pair.b.sge(0, 100), to=pair.a)
    (answer,) = hear(pair.a, output_of(pair.b.nic, now + 1e-3), THERE, now + 1e-3, marked=False)
    assert decode_packet_untrusted(answer.data, FORTH, 0).opcode is Opcode.ACKNOWLEDGE


def test_notifications_of_strangers_cut_nothing() -> None:
    pair = control(Pair(4096))
    notify(pair.a, 0.0, source=Address("10.0.0.9"))
    notify(pair.a, 0.0, qpn=pair.a.qp.number ^ 1)
    notify(pair.a, 0.0, data=Cnp(pair.a.qp.number, 0x1234).encode(BACK))
    right = Cnp(pair.a.qp.number, 0xFFFF).encode(BACK)
    notify(pair.a, 0.0, data=right[:-1] + bytes([right[-1] ^ 1]))
    notify(pair.a, 0.0, data=right[:-4])
    counters = pair.a.nic.counters
    assert pair.a.qp.limiter is None
    assert counters[Count.CNP_IGNORED] == 2
    assert counters[Count.WRONG_PKEY] == counters[Cause.ICRC] == counters[Cause.SHORT] == 1
    assert not counters[Count.CNP_HANDLED]


def test_a_queue_pair_of_datagrams_has_no_rate() -> None:
    pair = control(Pair(4096, kind=QpType.UD))
    notify(pair.a, 0.0)
    assert pair.a.nic.counters[Count.CNP_IGNORED] == 1
    assert pair.a.qp.limiter is None


def test_a_queue_pair_that_is_reset_forgets_its_rate() -> None:
    pair = control(Pair(1 << 16))
    notify(pair.a, 0.0)
    pair.a.post(SendOpcode.RDMA_WRITE, pair.a.sge(), to=pair.b)
    output_of(pair.a.nic, 0.0)
    pair.a.nic.advance(20e-6)
    output_of(pair.a.nic, 20e-6)
    pair.a.nic.destroy_qp(pair.a.qp)
    assert pair.a.qp.state is QpState.RESET
    assert pair.a.qp.limiter is None
    assert not output_of(pair.a.nic, 1.0)
    assert pair.a.nic.deadline() is None


def test_who_waits_for_its_time_goes_on_when_control_ends() -> None:
    pair = control(Pair(1 << 20, changes={"path_mtu": 5}))
    for _ in range(9):
        notify(pair.a, 0.0)
    pair.a.post(SendOpcode.RDMA_WRITE, pair.a.sge(), to=pair.b)
    pair.network.run(most_seconds=1e-3)
    control(pair, None)
    pair.run_until(1)
    assert pair.network.now < 1.2e-3


@pytest.mark.parametrize("seed", [1, 2])
def test_everything_arrives_through_a_congested_and_lossy_switch(seed: int) -> None:
    switch = Switch(LINE, room=1 << 20, chance=random.Random(seed))
    incast = Incast([1 << 20] * 3, switch, paced(switch), weather=Weather(loss=0.002), seed=seed)
    for number, sender in enumerate(incast.senders):
        sender.memory.view[:] = random.Random(number).randbytes(len(sender.memory.view))
    incast.run()
    for sender, sink in zip(incast.senders, incast.sinks, strict=True):
        assert sink.memory.view == sender.memory.view
        assert sink.memory.intact
    assert incast.sink.counters[Count.CNP_SENT] > 0


def test_control_keeps_the_queue_of_a_small_switch_from_running_over() -> None:
    """Four windows do not fit into it. Without control it drops packets, and the same are sent again."""
    dropped, carried = [], []
    for settings in (None, replace(SETTINGS, additive_part=0.01)):
        switch = Switch(LINE, mark_part=0.2, room=600_000)
        incast = Incast([4 << 20] * 4, switch, settings)
        incast.run()
        dropped.append(switch.dropped)
        carried.append(sum(switch.carried.values()))
    assert dropped[1] < dropped[0] / 5
    assert carried[1] < carried[0]
