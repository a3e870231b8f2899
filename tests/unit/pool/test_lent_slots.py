"""Values that one process of an agent writes, into slots that another lends and names."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from agent.pool.access import serve
from agent.pool.counters import MissCause
from agent.pool.errors import PutElsewhere, PutRefused, TooLong
from agent.pool.volume.bandwidth import Bandwidth
from agent.pool.volume.directory_cache import COOLDOWN_SECONDS
from agent.pool.volume.quota import Limits, Measured, Quota
from agent.pool.volume.volume import Keys, TenantShare
from agent.pool.write.batch import UNTRIED
from agent.pool.write.slot_messages import Kind
from agent.remote.fence import GIVEN_UP_SECONDS
from agent.sim.medium import fixed_secret
from tests.support.pool.lending import Died, Lending, content, nothing_is_held
from tests.support.pool.memory_channel import MemoryPending
from tests.support.pool.memory_pool import MemoryPool, key_of
from tests.support.pool.stuck_writes import Driven, StuckWrites

MANY = range(64)


def stuck(lending: Lending) -> StuckWrites:
    """The borrower's writes that are picked are never answered."""
    channel = StuckWrites(lending.reader.channel.namespaces)
    lending.reader.channel = channel
    return channel


def test_values_are_there_and_prove_themselves() -> None:
    lending = Lending((2, 2))
    assert lending.put(MANY) == [True] * 64
    assert lending.asked == [Kind.ASK, Kind.WRITTEN], "one message for all, and one of what became of them"
    later = lending.pool.agent()
    for number in MANY:
        for agent in (lending.first, later):
            assert agent.get(key_of(number)) == content(number)
    assert lending.first.tally.puts == 64
    assert lending.first.tally.bytes_written == sum(len(content(n)) for n in MANY)
    assert lending.reader.tally.puts == 0
    assert lending.put(MANY) == [False] * 64, "they are there"
    assert lending.first.tally.puts_already_there == 64
    lending.nothing_is_held()


@pytest.mark.parametrize("is_patient", [True, False])
def test_both_give_way_in_a_call_that_is_not_patient(is_patient: bool) -> None:
    lending = Lending((1, 1))
    lending.is_patient = is_patient
    said: list[str] = []
    for name, agent in (("lender", lending.first), ("borrower", lending.reader)):
        agent.channel.gives_way = lambda name=name: said.append(name)  # type: ignore[method-assign, misc]
    assert lending.put(range(4)) == [True] * 4
    assert said == ([] if is_patient else ["borrower", "lender", "lender"]), "with each message"
    lending.nothing_is_held()


def test_the_borrower_writes_slots_and_the_lender_one_directory_for_each_set() -> None:
    lending = Lending((1,))
    writes: dict[str, int] = {}
    for name, agent in (("lender", lending.first), ("borrower", lending.reader)):
        write = agent.channel.write

        def counted(*args: Any, name: str = name, write: Any = write, **more: Any) -> Any:
            writes[name] = writes.get(name, 0) + 1
            return write(*args, **more)

        agent.channel.write = counted  # type: ignore[method-assign]
    assert lending.put(range(20)) == [True] * 20
    assert writes == {"lender": 1, "borrower": 20}


def test_nothing_is_named_before_it_is_written() -> None:
    lending = Lending()

    def before(kind: Kind) -> None:
        if kind is Kind.WRITTEN:
            assert not any(entry for _, _, directory in lending.pool.directories() for entry in directory)
            for number in range(8):
                assert lending.first.get(key_of(number)) is MissCause.NEVER_STORED

    lending.before = before
    assert lending.put(range(8)) == [True] * 8
    lending.nothing_is_held()


def test_a_key_twice_in_a_call_keeps_its_first_value() -> None:
    lending = Lending()
    assert lending.put([1, 2, 1]) == [True, True, UNTRIED]
    assert lending.first.get(key_of(1)) == content(1)
    lending.nothing_is_held()


def test_a_key_that_another_put_has_is_left_to_a_put_of_its_own() -> None:
    lending = Lending()
    locks = lending.first.volume.key_locks
    pseudonym = lending.first.volume.placement.pseudonym(key_of(2))
    assert locks.take_at_once(pseudonym)
    assert lending.put([1, 2, 3]) == [True, UNTRIED, True]
    locks.end(pseudonym)
    lending.nothing_is_held()


def test_where_no_slot_is_lent_another_process_is_asked() -> None:
    lending = Lending()
    lending.lends = False
    with pytest.raises(PutElsewhere):
        lending.put([1, 2])
    assert not lending.broken_links, "that is an answer"
    lending.nothing_is_held()


def test_a_value_that_is_too_long_is_not_asked_for() -> None:
    lending = Lending(value_bytes=4096)
    with pytest.raises(TooLong):
        lending.put([60])
    assert not lending.asked


def test_a_time_to_live() -> None:
    lending = Lending()
    assert lending.put([1], ttl=5) == [True]
    assert lending.first.get(key_of(1)) == content(1)
    lending.first.channel.clock += 6
    assert lending.first.get(key_of(1)) is MissCause.EXPIRED


# -- writes that fail, or may land late ------------------------------------------------------------------


def test_a_slot_that_is_not_answered_cools_down_and_keeps_no_other_value() -> None:
    lending = Lending((1,))
    channel = stuck(lending)
    picked: list[int] = []

    def is_first(_namespace: int, offset: int) -> bool:
        picked.append(offset)
        return len(picked) == 1

    channel.is_stuck = is_first
    driven = Driven(channel, lending.steps(range(6)))
    assert driven.run(1.0) is None
    there = [n for n in range(6) if lending.first.get(key_of(n)) == content(n)]
    assert len(there) == 5, "they are told of while the other hangs"
    assert len(lending.first.volume.key_locks) == 1
    became = driven.run(10.0)
    assert became is not None
    (refused,) = [one for one in became if one is not True]
    assert isinstance(refused, PutRefused)
    assert refused.cause is MissCause.LATE
    lending.nothing_is_held()
    _takes_no_value_for_a_minute(lending, picked[0])


def _takes_no_value_for_a_minute(lending: Lending, offset: int) -> None:
    """What an enclosure has of a write may land there yet."""
    (cached,) = [each for each in lending.first.cache.snapshot() if each.cooldown_until]
    (slot,) = cached.cooldown_until
    assert lending.first.volume.slot_offset(cached, slot) == offset
    now = lending.first.channel.now()
    assert cached.cooldown_until[slot] == pytest.approx(now + COOLDOWN_SECONDS, abs=6)
    assert slot in cached.unavailable(now)


def test_a_slot_that_the_medium_refuses() -> None:
    lending = Lending((1,))
    write = lending.reader.channel.write

    def failing(namespace: int, offset: int, parts: Any, *, more: bool = False) -> Any:
        pending = write(namespace, offset, parts, more=more)
        pending.done, pending.fault, pending.unreachable = True, "Write Fault", False
        return pending

    lending.reader.channel.write = failing  # type: ignore[method-assign]
    (refused,) = lending.put([1])
    assert isinstance(refused, PutRefused)
    assert refused.cause is MissCause.CORRUPT
    assert lending.first.get(key_of(1)) is MissCause.NEVER_STORED
    assert len(lending.first.volume.media_errors)
    lending.nothing_is_held()


def test_a_place_where_an_earlier_write_may_land_is_not_lent() -> None:
    lending = Lending((1, 1))
    asked: list[tuple[int, int, int]] = []

    def fenced(namespace: int, offset: int, size: int) -> bool:
        asked.append((namespace, offset, size))
        return namespace == 0

    lending.fenced = fenced
    became = lending.put(range(8))
    assert set(map(repr, became)) == {"True", repr(UNTRIED)}
    assert {size for _, _, size in asked} == {lending.pool.settings.slot_bytes}
    assert became.count(UNTRIED) == sum(namespace == 0 for namespace, _, _ in asked)
    lending.nothing_is_held()


@pytest.mark.parametrize("may_write", [False, True])
def test_a_slot_whose_write_may_land_takes_no_value_though_its_directory_was_forgotten(
    may_write: bool,
) -> None:
    """A pool has more directories than an agent remembers, and a cool-down goes with its directory."""
    lending = Lending((1, 1))
    lending.first.cache.capacity = 0
    kept: list[tuple[int, int, bytes]] = []
    write = lending.reader.channel.write

    def kept_back(namespace: int, offset: int, parts: Any, *, more: bool = False) -> Any:
        kept.append((namespace, offset, b"".join(map(bytes, parts))))
        raise Died

    lending.reader.channel.write = kept_back  # type: ignore[method-assign]
    with pytest.raises(Died):
        lending.put([1])
    lending.close()
    lending.reader.channel.write = write  # type: ignore[method-assign]
    if may_write:
        lending.first.channel.clock = lending.reader.channel.clock = 1000 + GIVEN_UP_SECONDS + 1
    numbers = range(2, 60)
    there = [n for n, one in zip(numbers, lending.put(numbers), strict=True) if one is True]
    ((namespace, offset, late),) = kept
    assert lending.stands(namespace, offset, 4096, lending.first.channel.now()) is not may_write
    if not may_write:
        lending.pool.namespaces[namespace].store(offset, [late])
    assert len(there) > 40
    for number in there:
        assert lending.first.get(key_of(number)) == content(number)
    lending.nothing_is_held()


@pytest.mark.parametrize("was_sent", [False, True])
def test_a_borrower_that_has_no_way_to_an_enclosure(was_sent: bool) -> None:
    """The lender may have one. Where nothing was sent, no slot has to cool down."""
    lending = Lending((1, 1))
    lending.was_sent = was_sent

    def no_way(namespace: int, offset: int, parts: Any, *, more: bool = False) -> Any:
        return MemoryPending(done=True, fault="there is no queue to the enclosure", unreachable=True)

    lending.reader.channel.write = no_way  # type: ignore[method-assign]
    became = lending.put(MANY)
    cooling = sum(len(each.cooldown_until) for each in lending.first.cache.snapshot())
    if was_sent:
        assert all(isinstance(one, PutRefused) for one in became)
        assert cooling == 64
        return
    assert became == [UNTRIED] * 64
    assert cooling == 0
    assert lending.first.tally.puts_refused == 0
    lending.nothing_is_held()


def test_values_that_are_told_of_too_late_leave_no_directory_in_doubt() -> None:
    lending = Lending((1, 1))

    def before(kind: Kind) -> None:
        if kind is Kind.WRITTEN:
            lending.reader.channel.clock += 6

    lending.before = before
    became = lending.put(range(8))
    assert all(isinstance(one, PutRefused) and one.cause is MissCause.LATE for one in became)
    assert not any(entry for _, _, directory in lending.pool.directories() for entry in directory)
    assert not any(each.in_doubt or each.cooldown_until for each in lending.first.cache.snapshot())
    assert not any(
        lending.first.volume.in_doubt_writes.may_land(
            lending.first.volume.placement.pseudonym(key_of(number)), lending.first.channel.now()
        )
        for number in range(8)
    )
    lending.nothing_is_held()


# -- the end of the borrower -------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [Kind.PLACES, Kind.WRITTEN])
@pytest.mark.parametrize("lands", ["nothing", "late"])
def test_a_borrower_that_ends(at: Kind, lands: str) -> None:
    """Before it has written, or before it has told: its keys are free, its slots are not."""
    lending = Lending((1,))
    volume = lending.first.volume
    quota = Quota([Measured(volume.occupancy, volume.settings.slot_bytes)], Limits(slots=1000))
    volume.change(tenant=TenantShare(quota, None))
    kept: list[tuple[int, int, bytes]] = []

    def die(kind: Kind) -> None:
        if kind is at:
            raise Died

    write = lending.reader.channel.write

    def kept_back(namespace: int, offset: int, parts: Any, *, more: bool = False) -> Any:
        kept.append((namespace, offset, b"".join(map(bytes, parts))))
        if at is Kind.PLACES:
            raise Died
        return write(namespace, offset, parts, more=more)

    lending.before = die
    lending.reader.channel.write = kept_back  # type: ignore[method-assign]
    with pytest.raises(Died):
        lending.put(range(4))
    assert lending.broken_links == 1
    assert lending.slots is not None
    assert len(lending.slots.out) == 4
    assert quota.in_use()[0] == 4
    cached = next(each for each in lending.first.cache.snapshot() if each.reserved)
    lent = set(cached.reserved)
    assert len(lent) == 4, "nobody's, until it is known that the process has ended"
    lending.close()
    nothing_is_held(lending.first)
    assert quota.in_use()[0] == 0
    assert set(cached.cooldown_until) == lent
    if lands == "nothing":
        for namespace, offset, data in kept:
            lending.pool.namespaces[namespace].store(offset, [bytes(len(data))])
    # The same keys and others are stored at once, in other slots.
    for number in range(40):
        lending.first.put(key_of(number), content(number))
    named = {slot for _, _, directory in lending.pool.directories() for slot, _ in directory}
    assert not named & lent
    for namespace, offset, data in kept:
        lending.pool.namespaces[namespace].store(offset, [data])  # the late write
    for number in range(40):
        assert lending.first.get(key_of(number)) == content(number)
        assert lending.pool.agent().get(key_of(number)) == content(number)


def test_a_borrower_that_is_too_late_sends_nothing() -> None:
    lending = Lending()
    lending.before = lambda kind: setattr(
        lending.reader.channel, "clock", lending.reader.channel.clock + 6 * (kind is Kind.ASK)
    )
    assert lending.put([1, 2], seconds=5.0) == [UNTRIED, UNTRIED]
    assert all(not namespace.writes for namespace in lending.pool.namespaces)
    lending.nothing_is_held()


# -- quota, bandwidth, keys --------------------------------------------------------------------------------


def test_a_tenant_that_owes_bandwidth() -> None:
    lending = Lending()
    bandwidth = Bandwidth(threading.BoundedSemaphore(1), 100_000)
    lending.first.volume.change(tenant=TenantShare(None, bandwidth))
    bandwidth.charge(lending.first.channel, 1 << 20)
    assert lending.put([1, 2]) == [UNTRIED, UNTRIED]
    lending.nothing_is_held()


def rotated(lending: Lending) -> Keys:
    """A second data key, which opens what the first one sealed."""
    volume = lending.first.volume
    other = fixed_secret(7)
    return Keys(volume.codec_of(other, 1, (volume.codec,)))


def test_a_key_that_the_borrower_does_not_know_yet_seals_nothing_there() -> None:
    lending = Lending()
    lending.first.volume.change(keys=rotated(lending))
    assert lending.put([1, 2]) == [UNTRIED, UNTRIED]
    assert all(not namespace.writes for namespace in lending.pool.namespaces)
    lending.reader.volume.change(keys=rotated(lending))
    assert lending.put([1, 2]) == [True, True]
    assert lending.first.get(key_of(1)) == content(1)
    lending.nothing_is_held()


def test_the_earlier_key_seals_for_as_long_as_the_lender_says() -> None:
    lending = Lending()
    lending.reader.volume.change(keys=rotated(lending))
    assert lending.put([1]) == [True]
    assert lending.first.get(key_of(1)) == content(1)


def test_a_key_that_is_dropped_amid_a_put() -> None:
    """Nothing is acknowledged that only a dropped key opens."""
    lending = Lending()

    def drop(kind: Kind) -> None:
        if kind is Kind.WRITTEN:
            volume = lending.first.volume
            volume.change(keys=Keys(volume.codec_of(fixed_secret(7), 2)))

    lending.before = drop
    for refused in lending.put([1, 2]):
        assert isinstance(refused, PutRefused)
        assert refused.cause is MissCause.WRONG_KEY
    assert not any(entry for _, _, directory in lending.pool.directories() for entry in directory)
    lending.nothing_is_held()


@pytest.mark.parametrize("at", [Kind.ASK, Kind.WRITTEN])
def test_a_volume_that_is_erased_amid_a_put(at: Kind) -> None:
    lending = Lending()
    lending.before = lambda kind: lending.first.volume.change(erased=True) if kind is at else None
    for refused in lending.put([1, 2]):
        assert isinstance(refused, PutRefused)
        assert refused.cause is MissCause.WRONG_KEY
    lending.nothing_is_held()


def test_a_volume_that_is_erased_in_the_borrower_alone() -> None:
    lending = Lending()
    lending.reader.volume.change(erased=True)
    assert lending.put([1, 2]) == [UNTRIED, UNTRIED]
    assert all(not namespace.writes for namespace in lending.pool.namespaces)
    lending.nothing_is_held()


# -- others amid a put -------------------------------------------------------------------------------------


def test_a_delete_amid_a_put_and_after_it() -> None:
    lending = Lending()

    def delete(kind: Kind) -> None:
        if kind is Kind.WRITTEN:
            assert not lending.first.delete(key_of(1)), "it is not there yet"

    lending.before = delete
    assert lending.put([1, 2]) == [True, True]
    assert lending.first.get(key_of(1)) == content(1), "the put was acknowledged after the delete"
    assert lending.first.delete(key_of(1))
    for agent in (lending.first, lending.pool.agent()):
        assert not isinstance(agent.get(key_of(1)), bytes)
    lending.nothing_is_held()


def test_another_agent_takes_the_slot_meanwhile() -> None:
    """Its entry stays; of two values in one slot one proves itself, and the other is a miss."""
    lending = Lending((1,), value_bytes=4096)
    other = lending.pool.agent()
    lending.first.age_directories()

    def steal(kind: Kind) -> None:
        if kind is Kind.WRITTEN:
            other.put(key_of(1), b"other")

    lending.before = steal
    lending.put([1])
    for agent in (lending.first, other, lending.pool.agent()):
        assert agent.get(key_of(1)) in (content(1), b"other", MissCause.EVICTED, MissCause.NEVER_STORED)


def test_only_plain_volumes_of_one_copy_lend() -> None:
    for settings, lends in (({}, True), ({"copies": 2}, False)):
        agent = MemoryPool((2, 2), **settings).agent()
        assert serve(agent.volume).lends_slots is lends
    agent = MemoryPool((2, 2)).agent()
    agent.volume.change(erased=True)
    assert not serve(agent.volume).lends_slots
