"""Who of those that have proven nothing gives way to a newcomer."""

from __future__ import annotations

import pytest

from nvmeof.controller.queue_session import QueueSession
from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.target import Target
from nvmeof.controller.unauthenticated_connections import DISPLACED, SETTLED_S, GuestConnections, peer_of
from nvmeof.wire.fabrics import DISCOVERY_NQN
from nvmeof.wire.status import Status
from tests.support.nvme.heap_storage import HeapStorage
from tests.support.nvme.raw_host import RawHost, make_target

HOSTILE, HONEST = "192.0.2.66", "192.0.2.1"


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a socket", "a socket"),
    ],
)
def test_addresses_are_counted_by_what_a_stranger_has(address: str, peer: str) -> None:
    assert peer_of(address) == peer


def guest(guests: GuestConnections, peer: str, now: float = 0.0) -> QueueSession | None:
    """One more of a peer; None where it was refused."""
    session = QueueSession(Target())
    session.peer = peer
    return session if guests.admit(session, now) else None


def test_the_address_with_most_gives_way_to_another() -> None:
    guests = GuestConnections(4, 4)
    hostile = [guest(guests, HOSTILE) for _ in range(4)]
    honest = guest(guests, HONEST)
    assert honest in guests
    assert hostile[0] is not None
    assert hostile[0] not in guests
    assert hostile[0].close_reason == DISPLACED
    assert len(guests) == 4
    # Until the shares are equal.
    assert guest(guests, HONEST) in guests
    assert guest(guests, HONEST) is None
    assert guests.described() == {"now": 4, "displaced": 2, "refused": 1}


def test_among_equals_the_oldest_goes_once_it_had_its_time() -> None:
    guests = GuestConnections(2, 2)
    first, second = guest(guests, HONEST, 0.0), guest(guests, HONEST, 0.5)
    assert guest(guests, HONEST, SETTLED_S - 0.1) is None
    third = guest(guests, HONEST, SETTLED_S)
    assert first not in guests
    assert second in guests
    assert third in guests


def test_one_address_has_its_own_bound() -> None:
    guests = GuestConnections(8, 2)
    for _ in range(2):
        assert guest(guests, HOSTILE) is not None
    assert guest(guests, HOSTILE) is None
    assert guest(guests, HOSTILE, SETTLED_S) is not None
    assert guest(guests, HONEST) is not None
    assert len(guests) == 3


def test_who_needs_a_place_of_some_gets_it_of_those() -> None:
    guests = GuestConnections(8, 8)
    elsewhere = guest(guests, HOSTILE)
    here = guest(guests, HOSTILE)
    newcomer = QueueSession(Target())
    newcomer.peer = HONEST
    assert here is not None
    assert guests.admit(newcomer, 0.0, full_of={here})
    assert elsewhere in guests
    assert here not in guests
    assert not guests.admit(QueueSession(Target()), 0.0, full_of=set())


def test_leaving_twice_is_leaving() -> None:
    guests = GuestConnections(1, 1)
    only = guest(guests, HONEST)
    assert only is not None
    guests.leave(only)
    guests.leave(only)
    assert len(guests) == 0
    assert guest(guests, HONEST) is not None


# --- who is a guest ---------------------------------------------------------------------------------------


def entered(target: Target) -> RawHost:
    host = RawHost(target)
    assert host.queue.session.enter(HOSTILE, host.now)
    return host


def test_a_guest_is_one_until_it_is_a_host_of_a_subsystem() -> None:
    target, _ = make_target(HeapStorage())
    admin = entered(target)
    assert len(target.guests) == 1
    cntlid = admin.connect().result & 0xFFFF
    assert len(target.guests) == 0
    assert admin.property_set(0x14, 0x460001) == 0
    io = entered(target)
    assert io.connect(1, cntlid).status == Status.SUCCESS
    assert len(target.guests) == 0


def test_a_discovery_controller_stays_one_and_ends_when_it_is_displaced() -> None:
    target, _ = make_target(HeapStorage(), settings=ControllerSettings(max_guests=1))
    discovery = entered(target)
    assert discovery.connect(subsystem=DISCOVERY_NQN, kato=60_000).status == Status.SUCCESS
    assert len(target.guests) == 1
    honest = RawHost(target)
    assert honest.queue.session.enter(HONEST, honest.now)
    discovery.run()
    assert discovery.queue.finished
    discovery.queue.connection_lost()
    assert target.controllers == []


def test_one_that_is_displaced_with_unread_answers_ends_at_once() -> None:
    target, _ = make_target(HeapStorage(), settings=ControllerSettings(max_guests=1))
    deaf = entered(target)
    deaf.queue._send([bytes(4096)])
    honest = RawHost(target)
    assert honest.queue.session.enter(HONEST, honest.now)
    deaf.queue.run(deaf.now)
    assert deaf.queue.finished


def test_a_refused_or_lost_connection_is_no_guest() -> None:
    target, _ = make_target(HeapStorage())
    host = entered(target)
    assert host.connect(subsystem="nqn.2026-01.io.g35:nowhere").status
    assert len(target.guests) == 1
    host.queue.connection_lost()
    assert len(target.guests) == 0
