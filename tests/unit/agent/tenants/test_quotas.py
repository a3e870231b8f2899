"""What a tenant may have: slots, bytes and bandwidth, alone and against its neighbours."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from pydantic import ValidationError

from agent.errors import ConfigError
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.access import serve
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.map.document import MapTenant, PoolMap, VolumeWish, plan_pool, tenant_id
from agent.pool.map.tenant_changes import find_tenant, with_limits, with_tenant, without_key
from agent.pool.read.get import SlotReader
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.bandwidth import BURST_SECONDS, Bandwidth, TokenBucket
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.eviction_holds import Hold
from agent.pool.volume.quota import Limits, Measured, Quota
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.pool.write.delete_and_pin import delete, pin
from agent.pool.write.put import SlotWriter
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from agent.sizes import parse_size
from agent.telemetry import metrics, snapshot
from agent.tenancy.limits import TenantLimits
from agent.tenancy.visibility import Audience
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import key_of, nguid_of

ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
SIZE = 48 << 20
VALUE = b"blue" * 100


def planned() -> PoolMap:
    wishes = [
        VolumeWish(name=name, value_bytes=1 << 16, share=share, tenant=tenant, kind=kind)
        for name, tenant, share, kind in (
            ("blue", "blue", 0.4, "kv"), ("blue-files", "blue", 0.1, "files"), ("red", "red", 0.3, "kv"),
        )
    ]  # fmt: skip
    return plan_pool([(nguid_of(number), SIZE) for number in range(2)], wishes, ROOT)


class Shelf:
    """Flash of two namespaces; `agent` opens it as one more agent of the pool would."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.pool_map = planned()
        self.namespaces = [MemoryNamespace(SIZE) for _ in range(2)]

    def limit(self, **limits: int) -> None:
        self.pool_map = with_limits(self.pool_map, "blue", **limits)

    def agent(self, workers: int = 2, cache_bytes: int = 16 << 20) -> Agent:
        return Agent(self, workers, cache_bytes)


class Agent:
    def __init__(self, shelf: Shelf, workers: int, cache_bytes: int) -> None:
        self.shelf = shelf
        self.channel = MemoryChannel(shelf.namespaces)
        self.cache = DirectoryCache(cache_bytes)
        self.volumes = {
            each.name: Volume(
                shelf.pool_map.settings(each), shelf.pool_map.secret(each, ROOT), self.cache, Timing()
            )
            for each in shelf.pool_map.volumes
        }
        self.tenants = TenantLimits(shelf.pool_map, list(self.volumes.values()), workers, ROOT, shelf.state)

    def put(self, volume: str, number: int, value: bytes = VALUE, *, may_evict: bool = True) -> None:
        self.channel.clock += 0.1
        writing = SlotWriter(self.volumes[volume], key_of(number), length=len(value), may_evict=may_evict)
        assert self.channel.run(writing.write(self.channel, 0, memoryview(value), self.channel.now() + 5))

    def get(self, volume: str, number: int) -> bytes | MissCause:
        reading, into = SlotReader(self.volumes[volume], key_of(number)), bytearray(1 << 16)
        count = self.channel.run(reading.read(self.channel, 0, memoryview(into), self.channel.now() + 0.05))
        return bytes(into[:count]) if reading.cause is None else reading.cause

    def stored(self, volume: str, numbers: range) -> int:
        return sum(self.get(volume, number) == VALUE for number in numbers)

    def look(self, times: int = 4) -> None:
        for _ in range(times):
            self.channel.run(self.tenants.look(self.channel))

    def row(self, name: str = "blue") -> dict[str, object]:
        return next(row for row in self.tenants.snapshot() if row["name"] == name)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


# -- room ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["slots", "bytes"])
def test_at_its_quota_a_tenant_evicts_its_own_and_nobody_elses(shelf: Shelf, limit: str) -> None:
    slot = shelf.pool_map.settings(shelf.pool_map.volumes[0]).slot_bytes
    shelf.limit(**({"quota_slots": 40} if limit == "slots" else {"quota_bytes": 40 * slot + 5}))
    agent = shelf.agent()
    for number in range(60):
        agent.put("red", number)
    for number in range(100):
        agent.put("blue", number)
        assert agent.row()["slots_known_taken"] == min(number + 1, 40)
    assert agent.row()["bytes_known_taken"] == 40 * slot
    assert agent.row()["quota_evictions"] == 60
    assert agent.stored("blue", range(100)) == 40
    assert agent.get("blue", 99) == VALUE, "the last one is there"
    assert agent.stored("red", range(60)) == 60, "the neighbour has all that it had"
    assert agent.row("red")["quota_evictions"] == 0
    # What was evicted is a miss with its cause, as far as ghosts reach back.
    causes = {agent.get("blue", number) for number in range(100)} - {VALUE}
    assert MissCause.EVICTED in causes
    assert causes <= {MissCause.EVICTED, MissCause.NEVER_STORED}


def test_eviction_is_found_in_other_sets_too(shelf: Shelf) -> None:
    """With a quota far below the volume's size, a new key's own two sets mostly hold nothing."""
    shelf.limit(quota_slots=3)
    agent = shelf.agent()
    for number in range(40):
        agent.put("blue", number)
        assert agent.get("blue", number) == VALUE
        assert agent.row()["slots_known_taken"] <= 3
    assert agent.stored("blue", range(40)) == 3


def test_deleting_makes_room_and_pins_are_kept(shelf: Shelf) -> None:
    shelf.limit(quota_slots=2)
    agent = shelf.agent()
    agent.put("blue", 1)
    agent.put("blue", 2)
    volume, channel = agent.volumes["blue"], agent.channel
    until = int(channel.wall()) + 1000
    for number in (1, 2):
        assert channel.run(pin(volume, channel, key_of(number), until, channel.now() + 1))
    with pytest.raises(PutRefused, match="quota") as refused:
        agent.put("blue", 3)
    assert refused.value.cause is None, "the host is told ENOSPC"
    assert agent.row()["quota_puts_refused"] == 1
    assert channel.run(delete(volume, channel, key_of(1), channel.now() + 1))
    agent.put("blue", 3)
    assert [agent.get("blue", number) for number in (2, 3)] == [VALUE, VALUE]


def test_blocks_of_files_are_refused_and_never_evicted(shelf: Shelf) -> None:
    shelf.limit(quota_slots=5)
    agent = shelf.agent()
    for number in range(5):
        agent.put("blue-files", number, may_evict=False)
    with pytest.raises(PutRefused, match="quota"):
        agent.put("blue-files", 5, may_evict=False)
    with pytest.raises(PutRefused, match="quota"):
        agent.put("blue", 1)
    shelf.limit(quota_slots=2)
    agent.tenants.follow(shelf.pool_map)
    agent.look()
    assert agent.stored("blue-files", range(5)) == 5, "also when the quota is lowered"


def test_a_put_that_fails_leaves_nothing_set_aside(shelf: Shelf) -> None:
    shelf.limit(quota_slots=10)
    agent = shelf.agent()
    agent.put("blue", 0)
    for namespace in shelf.namespaces:
        namespace.broken = True
    for number in range(1, 9):
        with pytest.raises(PutRefused):
            agent.put("blue", number)
    for namespace in shelf.namespaces:
        namespace.broken = False
    writing = SlotWriter(agent.volumes["blue"], key_of(20))
    agent.channel.run(writing.write(agent.channel, 0, memoryview(VALUE), agent.channel.now() + 5))
    assert agent.row()["slots_known_taken"] == 2
    writing.drop()
    assert agent.row()["slots_known_taken"] == 1


def test_a_quota_is_the_pools_and_other_agents_are_counted_by_the_walk(shelf: Shelf) -> None:
    shelf.limit(quota_slots=30)
    one, other = shelf.agent(), shelf.agent()
    for number in range(30):
        one.put("blue", number)
    for number in range(30, 50):
        other.put("blue", number)
    other.look()
    assert other.row()["slots_known_taken"] <= 30, "the walk counts the other's, and evicts what is too much"
    assert other.row()["quota_evictions"]
    one.look()
    assert one.row()["slots_known_taken"] == other.row()["slots_known_taken"]
    assert shelf.agent().stored("blue", range(50)) <= 30


def test_an_agent_that_starts_counts_what_there_is_and_a_lowered_quota_is_kept(shelf: Shelf) -> None:
    first = shelf.agent()
    for number in range(50):
        first.put("blue", number)
    shelf.limit(quota_slots=50)
    later = shelf.agent()
    assert later.row()["slots_known_taken"] == 0
    later.look()
    assert later.row()["slots_known_taken"] == 50
    shelf.limit(quota_slots=12)
    later.tenants.follow(shelf.pool_map)
    later.look()
    assert later.row()["slots_known_taken"] == 12
    assert later.stored("blue", range(50)) == 12
    shelf.limit(quota_slots=0)
    later.tenants.follow(shelf.pool_map)
    later.put("blue", 60)
    assert later.row()["slots_known_taken"] == 13


def test_the_count_holds_when_directories_are_forgotten(shelf: Shelf) -> None:
    """A cache for 16 sets, of 18 and those of the neighbour."""
    shelf.limit(quota_slots=500)
    agent = shelf.agent(cache_bytes=1)
    for number in range(300):
        agent.put("blue", number)
        agent.put("red", number)
    assert agent.row()["slots_known_taken"] == 300
    agent.look()
    assert agent.row()["slots_known_taken"] == 300
    assert agent.channel.tally("blue").evictions == 0


@pytest.mark.parametrize("limit", ["slots", "bytes"])
def test_of_all_volumes_together_no_more_than_half_is_held(shelf: Shelf, limit: str) -> None:
    """Else nothing could be evicted for a new value of either."""
    wishes = [
        VolumeWish(name=name, value_bytes=1 << 16, share=0.4, tenant="blue") for name in ("blue", "more")
    ]
    shelf.pool_map = plan_pool([(nguid_of(number), SIZE) for number in range(2)], wishes, ROOT)
    slot = shelf.pool_map.settings(shelf.pool_map.volumes[0]).slot_bytes
    shelf.limit(**({"quota_slots": 8} if limit == "slots" else {"quota_bytes": 8 * slot}))
    agent = shelf.agent()
    held = []
    for name in ("blue", "more"):
        for number in range(4):
            agent.put(name, number)
        keys, volume = [key_of(number) for number in range(4)], serve(agent.volumes[name])
        one = agent.channel.run(volume.hold(agent.channel, keys, agent.channel.now() + 5))
        assert isinstance(one, Hold)
        held.append(one)
    assert [each.kept for each in held] == [4, 0]
    agent.put("more", 10)
    agent.put("blue", 10)
    assert agent.stored("blue", range(4)) == 4, "they are held"
    assert agent.get("blue", 10) == agent.get("more", 10) == VALUE


def test_an_erased_tenant_has_nothing(shelf: Shelf) -> None:
    agent = shelf.agent()
    for number in range(5):
        agent.put("blue", number)
    assert agent.row()["slots_known_taken"] == 5
    for name in ("blue", "blue-files"):
        agent.volumes[name].change(erased=True)
    row = agent.row()
    assert (row["volumes"], row["slots_known_taken"], row["bytes_known_taken"]) == ([], 0, 0)


def test_threads_together_do_not_set_aside_more_than_there_is(shelf: Shelf) -> None:
    volume = shelf.agent().volumes["blue"]
    quota = Quota([Measured(volume.occupancy, 100)], Limits(slots=50))
    taken: list[bool] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(10)
        for _ in range(40):
            taken.append(quota.set_aside(100))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sum(taken) == 50
    assert quota.in_use() == (50, 5000)
    assert not quota.is_over()


# -- bandwidth ----------------------------------------------------------------------------------------


def test_a_bucket_fills_at_its_rate_and_owes_what_was_moved() -> None:
    bucket = TokenBucket(1000, 0.0)
    assert bucket.ready_at(0.0) == 0.0
    bucket.charge(int(1000 * BURST_SECONDS) + 500, 0.0)
    assert bucket.ready_at(0.0) == pytest.approx(0.5)
    assert bucket.ready_at(0.3) == pytest.approx(0.5)
    assert bucket.ready_at(0.6) == 0.6
    bucket.charge(0, 1000.0)
    bucket.charge(int(1000 * BURST_SECONDS) + 100, 1000.0)
    assert bucket.ready_at(1000.0) == pytest.approx(1000.1), "a long rest is worth no more than the burst"


def test_over_its_bandwidth_a_tenant_waits_and_its_neighbour_does_not(shelf: Shelf) -> None:
    size = 1 << 16
    shelf.limit(bandwidth=10 * size)
    agent = shelf.agent()
    value = random.Random(1).randbytes(size)
    for number in range(30):
        agent.put("blue", number, value)
    began = agent.channel.now()
    for number in range(30, 60):
        agent.channel.clock -= 0.1
        agent.put("blue", number, value)
    took = agent.channel.now() - began
    assert took == pytest.approx(3.0, abs=0.5), "30 values at 10 a second"
    assert agent.row()["bandwidth_waits"]
    before = agent.channel.now()
    agent.channel.clock -= 0.1
    agent.put("red", 1, value)
    assert agent.channel.now() == pytest.approx(before), "red waits for nothing"
    # A read has a twentieth of a second: what blue owes is not paid by then.
    assert agent.get("red", 1) == value
    causes = [agent.get("blue", 59) for _ in range(5)]
    assert MissCause.LATE in causes
    assert agent.channel.tally("blue").misses[MissCause.LATE] == agent.row()["bandwidth_late"]


def test_a_put_that_cannot_be_in_time_is_refused_as_late(shelf: Shelf) -> None:
    shelf.limit(bandwidth=1000)
    agent = shelf.agent()
    agent.put("blue", 1, bytes(1 << 16))
    with pytest.raises(PutRefused, match="bandwidth") as refused:
        agent.put("blue", 2, VALUE)
    assert refused.value.cause is MissCause.LATE
    shelf.limit(bandwidth=0)
    agent.tenants.follow(shelf.pool_map)
    agent.put("blue", 2, VALUE)


def test_seats_for_waiting_are_few() -> None:
    channel, seats = MemoryChannel([]), threading.BoundedSemaphore(1)
    one, other = Bandwidth(seats, 1000), Bandwidth(seats, 1000)
    for each in (one, other):
        each.charge(channel, 1000)
    steps = one.admit(channel, channel.now() + 100)
    next(steps)
    assert channel.run(other.admit(channel, channel.now() + 100)) is False, "the seat is taken: late at once"
    assert other.late == 1
    steps.close()
    assert channel.run(other.admit(channel, channel.now() + 100)) is True
    assert other.waits == 1
    assert channel.run(Bandwidth(threading.BoundedSemaphore(0)).admit(channel, channel.now())) is True, (
        "no limit, no seat needed"
    )


# -- the map, and what is said --------------------------------------------------------------------------


def test_a_quota_below_one_slot_is_refused(shelf: Shelf) -> None:
    slot = shelf.pool_map.settings(shelf.pool_map.volumes[0]).slot_bytes
    with pytest.raises(ConfigError, match="less than a slot"):
        shelf.limit(quota_bytes=slot - 1)
    shelf.limit(quota_bytes=slot)
    shelf.limit(quota_bytes=0)


@pytest.mark.parametrize("text", ["0.5", "0.0001K", "9" * 400, "8388608T"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="less than"):
        parse_size(text)


def test_the_sizes_that_there_are() -> None:
    sizes = {"0": 0, "0.5K": 512, "1G": 1 << 30, "1.5 MiB": 3 << 19, "8388607T": (1 << 63) - (1 << 40)}
    assert {text: parse_size(text) for text in sizes} == sizes


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[31mred", "x" * 65, "a\x9bb", "a\u202eb", "a\x00"])
def test_what_a_terminal_would_obey_is_no_name(name: str) -> None:
    with pytest.raises(ValidationError, match="no control characters"):
        VolumeWish(name="v", value_bytes=1 << 16, share=1.0, tenant=name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x" * 65, "has 65 characters, and 64 are the most"),
        ("équipe", "has 'é' in it"),
        ("blue ", "has ' ' in it"),
        ("-blue", "does not begin with a letter or a digit"),
    ],
)
def test_new_volumes_and_new_tenants_have_names_by_one_rule(name: str, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        VolumeWish(name=name, value_bytes=1 << 16, share=1.0)
    with pytest.raises(ConfigError, match=f"no such tenant can be made: the name '{name}' {why}"):
        with_tenant(planned(), name, [], ROOT)


def test_a_pool_is_formatted_with_tenants_by_that_rule() -> None:
    wish = VolumeWish(name="v", value_bytes=1 << 16, share=1.0, tenant="équipe")
    with pytest.raises(ConfigError, match="no such tenant can be made: the name 'équipe'"):
        plan_pool([(nguid_of(0), SIZE)], [wish], ROOT)


def test_a_tenant_that_a_pool_has_under_another_name_goes_on() -> None:
    pool_map, name = planned(), "équipe bleue"
    known = MapTenant(name=name, tenant_id=tenant_id(name), wrapped_key=pool_map.tenants[0].wrapped_key)
    before = pool_map.model_copy(update={"tenants": (*pool_map.tenants, known)})
    erased = without_key(PoolMap.model_validate(before.model_dump()), known.name)
    again, _ = with_tenant(erased, known.name, [], ROOT)
    assert not find_tenant(again, known.name).is_erased


def test_no_cache_of_a_tenant_keeps_another_empty(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    wishes = [
        VolumeWish(name=name, value_bytes=size, share=0.4, tenant="blue")
        for name, size in (("one", 1 << 16), ("two", 1 << 18))
    ]
    shelf.pool_map = plan_pool([(nguid_of(number), 2 * SIZE) for number in range(2)], wishes, ROOT)
    shelf.namespaces = [MemoryNamespace(2 * SIZE) for _ in range(2)]
    one, two = (shelf.pool_map.settings(each).slot_bytes for each in shelf.pool_map.volumes)
    shelf.limit(quota_bytes=50 * one)
    agent = shelf.agent()
    for number in range(60):
        agent.put("one", number)
    for number in range(100, 120):
        agent.put("two", number)
        assert agent.get("two", number) == VALUE
        size = agent.row()["bytes_known_taken"]
        assert isinstance(size, int)
        assert size <= 50 * one
    held = agent.stored("two", range(100, 120)) * two
    assert 10 * one < held <= 30 * one, "about half each"
    assert agent.row()["quota_puts_refused"] == 0


def test_limits_stand_in_the_map_and_outlive_the_key(shelf: Shelf) -> None:
    plain = shelf.pool_map
    assert b"quota" not in plain.encode(), "older agents read a map without limits"
    shelf.limit(quota_slots=5, bandwidth=7)
    assert shelf.pool_map.version == plain.version + 1
    blue = shelf.pool_map.tenants[0]
    assert (blue.quota_slots, blue.quota_bytes, blue.bandwidth) == (5, 0, 7)
    shelf.limit(quota_bytes=600_000)
    assert with_limits(shelf.pool_map, "blue", quota_bytes=600_000) is shelf.pool_map
    blue = without_key(shelf.pool_map, "blue").tenants[0]
    assert (blue.quota_slots, blue.quota_bytes, blue.bandwidth) == (5, 600_000, 7)
    with pytest.raises(ConfigError, match="no tenant grey"):
        with_limits(plain, "grey", quota_slots=1)
    on_kv = VolumeWish(name="kv", value_bytes=1 << 16, share=1.0, tenant="blue")
    with pytest.raises(ConfigError, match="KV namespaces"):
        with_limits(plan_pool([], [on_kv], ROOT, [(nguid_of(0), SIZE)]), "blue", quota_slots=1)


def test_status_and_metrics_tell_of_tenants_and_a_door_of_its_own_only(shelf: Shelf) -> None:
    shelf.limit(quota_slots=5)
    agent = shelf.agent()
    agent.put("blue", 1)
    agent.get("blue", 1)
    volumes = list(agent.volumes.values())
    sources = snapshot.Sources(
        pool_id="pool", map_version=lambda: 1, mount="/mnt", door="fuse", volumes=volumes,
        fabric=Fabric([Enclosure("shelf")]), directories=agent.cache, prestage=PrestageCache(0),
        tallies=lambda: [agent.channel.tallies], files=lambda: None, tenants=agent.tenants.snapshot,
    )  # fmt: skip
    whole = snapshot.take(sources)
    assert [row["name"] for row in whole["tenants"]] == ["blue", "red"]
    assert (whole["tenants"][0]["bytes_read"], whole["tenants"][0]["puts"]) == (len(VALUE), 1)
    samples = {
        (sample.name, sample.labels["tenant"]): sample.value
        for family in metrics.Collector(lambda: whole).collect()
        for sample in family.samples
        if "tenant" in sample.labels
    }
    assert samples["g35_tenant_slots_max", "blue"] == 5
    assert samples["g35_tenant_slots_known_taken", "blue"] == 1
    assert samples["g35_tenant_bytes_written_total", "red"] == 0

    for tenant, seen in (("red", ["red"]), ("blue", [])):
        audience = Audience("agent", tenants=(tenant,))
        own = audience.in_status([serve(each) for each in volumes])
        said = snapshot.take(audience.sources(sources, own))
        assert [row["name"] for row in said["tenants"]] == seen, "blue has files that this door does not show"
