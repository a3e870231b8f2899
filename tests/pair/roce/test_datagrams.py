"""Unreliable datagrams, and QP1, which the connection manager speaks through."""

from __future__ import annotations

import pytest

from emulator.roce.nic.counters import Count
from emulator.roce.nic.verbs import (
    GRH_BYTES,
    QpAttr,
    QpAttributes,
    QpCapabilities,
    QpState,
    QpType,
    SendOpcode,
    VerbsError,
    WcFlags,
    WcStatus,
)
from emulator.roce.wire.flow import gid_of, ip_of
from tests.support.roce.memory_network import MemoryNetwork
from tests.support.roce.posts import Post
from tests.support.roce.weather import CALM


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(CALM)


@pytest.mark.parametrize(("one", "other"), [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")])
@pytest.mark.parametrize("gsi", [False, True])
def test_a_datagram_comes_with_where_it_came_from(
    network: MemoryNetwork, one: str, other: str, gsi: bool
) -> None:
    a, b = Post(network, one, gsi=gsi), Post(network, other, gsi=gsi)
    a.memory.view[:256] = bytes(range(256))
    b.receive(GRH_BYTES + 256)
    a.send(b, 256, qkey=a.qp.attributes.qkey, opcode=SendOpcode.SEND_WITH_IMM, imm=99)
    network.run()
    assert [c.status for c in a.polled()] == [WcStatus.SUCCESS]
    (received,) = b.polled()
    assert (received.status, received.byte_len) == (WcStatus.SUCCESS, GRH_BYTES + 256)
    assert received.flags == WcFlags.GRH | WcFlags.WITH_IMM
    assert (received.imm, received.src_qp, received.source) == (99, a.qp.number, one)
    assert b.memory.view[0x8000 + GRH_BYTES : 0x8000 + GRH_BYTES + 256] == bytes(range(256))
    header = bytes(b.memory.view[0x8000 : 0x8000 + GRH_BYTES])
    if ":" in one:
        assert header[8:40] == gid_of(one) + gid_of(other)
    else:
        assert header[:20] == bytes(20)
        assert header[32:40] == gid_of(one)[12:] + gid_of(other)[12:]
    assert b.memory.intact


def test_a_controlled_q_key_stands_for_our_own(network: MemoryNetwork) -> None:
    a, b = Post(network, "10.0.0.1"), Post(network, "10.0.0.2")
    b.receive(100)
    a.send(b, 16, qkey=0x80000000)
    network.run()
    assert len(b.polled()) == 1


def test_what_is_dropped_without_a_word(network: MemoryNetwork) -> None:
    a, b = Post(network, "10.0.0.1"), Post(network, "10.0.0.2")
    a.send(b, 16)
    network.run()
    b.receive(100)
    a.send(b, 16, qkey=5)
    network.run()
    assert [c.status for c in a.polled()] == [WcStatus.SUCCESS] * 2
    assert not b.polled()
    assert b.nic.counters[Count.NO_RECEIVE] == b.nic.counters[Count.WRONG_QKEY] == 1
    assert b.qp.state is QpState.RTS


def test_a_datagram_too_long_for_its_receive(network: MemoryNetwork) -> None:
    a, b = Post(network, "10.0.0.1"), Post(network, "10.0.0.2")
    b.receive(GRH_BYTES + 15)
    a.send(b, 16)
    network.run()
    assert [c.status for c in b.polled()] == [WcStatus.LOC_LEN_ERR]
    assert b.memory.intact
    assert not any(b.memory.view)


def test_a_message_is_one_packet(network: MemoryNetwork) -> None:
    a, b = Post(network, "10.0.0.1"), Post(network, "10.0.0.2")
    a.send(b, 4097)
    network.run()
    assert [c.status for c in a.polled()] == [WcStatus.LOC_LEN_ERR]
    assert a.qp.state is QpState.SQE
    a.send(b, 16)
    assert [c.status for c in a.polled()] == [WcStatus.WR_FLUSH_ERR]
    a.receive(100)
    b.send(a, 16)
    network.run()
    assert len(a.polled()) == 1, "receives go on in SQE"
    a.qp.modify(QpAttributes(state=QpState.RTS), QpAttr.STATE)
    b.receive(100)
    a.send(b, 16)
    network.run()
    assert [c.status for c in a.polled()] == [WcStatus.SUCCESS]


def test_there_is_one_qp1(network: MemoryNetwork) -> None:
    a = Post(network, "10.0.0.1", gsi=True)
    assert a.qp.number == 1
    with pytest.raises(VerbsError, match="QP1 is in use"):
        a.nic.create_qp(a.pd, QpType.UD, a.cq, a.cq, QpCapabilities(), gsi=True)


def test_gids_are_addresses() -> None:
    assert gid_of("192.0.2.7").hex() == "00000000000000000000ffffc0000207"
    for ip in ("192.0.2.7", "fd00::1"):
        assert ip_of(gid_of(ip)) == ip
    with pytest.raises(ValueError, match="16 bytes"):
        ip_of(b"\0" * 4)
    with pytest.raises(ValueError, match="IP address"):
        gid_of("host")
