"""Tenants: keys that wrap keys, and an erased tenant whose bytes are all there and open for nobody."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.attach.map_history import MapHistory
from agent.attach.map_watch import EVERY_SECONDS, MapWatch
from agent.errors import ConfigError
from agent.inline.cipher_suites import Place
from agent.inline.scatter import Buffer
from agent.inline.secrets import Purpose, RootKey, SecretKey, WrongKey, unwrap_secret
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.sealed_slot import HEADER_BYTES, MAGIC, OpenSlot, SlotCodec
from agent.pool.kv.commands import RESERVED_KEY
from agent.pool.kv.get import KvReader
from agent.pool.kv.put import KvWriter
from agent.pool.kv.volume import KvVolume
from agent.pool.map.commit import replace_map
from agent.pool.map.document import (
    MapTenant,
    MapVolume,
    PoolMap,
    VolumeWish,
    decode_pool_map_untrusted,
    plan_pool,
    tenant_id,
    tenant_key,
    volume_context,
)
from agent.pool.map.inspect import inspect, newest_map
from agent.pool.map.key_epochs import slots_taken
from agent.pool.map.superblock import COPY_OFFSETS, Superblock
from agent.pool.map.tenant_changes import with_tenant, without_key
from agent.pool.read.get import SlotReader
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import PoolVolume, Volume
from agent.pool.write.delete_and_pin import delete
from agent.pool.write.put import SlotWriter
from agent.remote.fabric import Fabric
from agent.sim.seeded_scheduler import StepScheduler
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import key_of, nguid_of
from tests.support.pool.no_seal import EveryCopyCounts
from tests.support.pool.staged import add_staged
from tests.support.sim.kv_flash import KvSimPending, SimKvChannel, SimKvNamespace

ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
SIZE = 32 << 20
MEMBERS = [(nguid_of(number), SIZE) for number in range(2)]
NUMBERS = {nguid.hex(): number for number, (nguid, _) in enumerate(MEMBERS)}
VALUE = b"what blue has stored" * 100


def wish(name: str, tenant: str, share: float = 0.3, **changes: Any) -> VolumeWish:
    return VolumeWish(name=name, value_bytes=1 << 16, share=share, tenant=tenant, **changes)


def planned(*more: VolumeWish) -> PoolMap:
    return plan_pool(MEMBERS, [wish("blue", "blue"), wish("red", "red"), *more], ROOT)


def watch_over(
    pool_map: PoolMap,
    volumes: Sequence[PoolVolume],
    state: Path,
    prestage: PrestageCache | None = None,
    fabric: Fabric | None = None,
    followed: Callable[[PoolMap], None] = lambda _: None,
) -> MapWatch:
    """An agent's look at the pool map. `state`: its folder."""
    fabric, history = fabric or Fabric(()), MapHistory(state)
    prestage = prestage or PrestageCache(0)
    return MapWatch(pool_map, volumes, prestage, history, ROOT, fabric, EveryCopyCounts(ROOT), followed)


@dataclass
class Flash:
    """A pool of two namespaces in memory, formatted."""

    pool_map: PoolMap = field(default_factory=planned)

    def __post_init__(self) -> None:
        self.namespaces = [MemoryNamespace(SIZE) for _ in MEMBERS]
        self.channel = MemoryChannel(self.namespaces)
        assert not self.replace(self.pool_map)
        self.cache = DirectoryCache(16 << 20)
        self.volumes = {volume.name: self.open(volume) for volume in self.pool_map.volumes}

    def open(self, volume: MapVolume) -> Volume:
        return Volume(
            self.pool_map.settings(volume), self.pool_map.secret(volume, ROOT), self.cache, Timing()
        )

    def watch(
        self,
        state: Path,
        prestage: PrestageCache | None = None,
        fabric: Fabric | None = None,
        followed: Callable[[PoolMap], None] = lambda _: None,
    ) -> MapWatch:
        return watch_over(self.pool_map, list(self.volumes.values()), state, prestage, fabric, followed)

    def replace(self, pool_map: PoolMap, numbers: dict[str, int] | None = None) -> dict[str, str]:
        return self.channel.run(replace_map(self.channel, pool_map, NUMBERS if numbers is None else numbers))

    def found(self) -> PoolMap:
        return newest_map(
            [
                self.channel.run(inspect(self.channel, number, nguid, size))
                for number, (nguid, size) in enumerate(MEMBERS)
            ]
        )

    def put(self, volume: str, key: bytes, value: bytes = VALUE) -> None:
        writing = SlotWriter(self.volumes[volume], key, length=len(value))
        assert self.channel.run(writing.write(self.channel, 0, memoryview(value), self.channel.now() + 5))

    def get(self, volume: str, key: bytes) -> bytes | MissCause:
        reading, into = SlotReader(self.volumes[volume], key), bytearray(1 << 16)
        count = self.channel.run(reading.read(self.channel, 0, memoryview(into), self.channel.now() + 1))
        return bytes(into[:count]) if reading.cause is None else reading.cause

    def media(self) -> Iterator[tuple[int, int, bytes]]:
        """Every block that was ever written, as it lies there: namespace, offset, bytes."""
        for number, namespace in enumerate(self.namespaces):
            for offset, block in sorted(namespace.blocks.items()):
                yield number, offset, block


# -- what wraps what --------------------------------------------------------------------------------


def test_each_tenant_has_a_key_that_opens_its_own_volumes_only() -> None:
    pool_map = planned(wish("more", "blue", 0.2))
    assert [each.name for each in pool_map.tenants] == ["blue", "red"]
    keys = {each.name: tenant_key(pool_map.pool_id, each, ROOT) for each in pool_map.tenants}
    for volume in pool_map.volumes:
        whose = next(each.name for each in pool_map.tenants if each.tenant_id == volume.tenant)
        context, wrapped = volume_context(pool_map.pool_id, volume, 0), volume.wrapped_secret
        for name, key in keys.items():
            if name == whose:
                opened = unwrap_secret(key, Purpose.VOLUME, context, bytes.fromhex(wrapped))
                assert opened.reveal() == pool_map.secret(volume, ROOT).reveal()
            else:
                with pytest.raises(WrongKey):
                    unwrap_secret(key, Purpose.VOLUME, context, bytes.fromhex(wrapped))
        with pytest.raises(WrongKey):
            ROOT.unwrap(Purpose.VOLUME, context, bytes.fromhex(wrapped))


def test_a_wrapped_key_of_another_tenant_or_pool_does_not_open() -> None:
    pool_map = planned()
    blue, red = pool_map.tenants
    with pytest.raises(WrongKey):
        tenant_key(pool_map.pool_id, red.model_copy(update={"wrapped_key": blue.wrapped_key}), ROOT)
    with pytest.raises(WrongKey):
        tenant_key("00" * 16, blue, ROOT)
    swapped = pool_map.model_copy(
        update={"tenants": (blue.model_copy(update={"wrapped_key": red.wrapped_key}), red)}
    )
    with pytest.raises(ConfigError, match="does not open"):
        swapped.secret(pool_map.volumes[0], ROOT)


def test_a_root_key_says_which_it_is_and_shows_nothing() -> None:
    said = ROOT.describe()
    assert "a test" in said
    assert (b"\x11" * 32).hex() not in said
    assert repr(ROOT).find("\\x11") < 0


@pytest.mark.parametrize("what", ["twice", "same name", "nobodys", "not hex"])
def test_tenants_that_cannot_be_are_refused(what: str) -> None:
    document = planned().model_dump(mode="json")
    blue, red = document["tenants"]
    match what:
        case "twice":
            document["tenants"] = [blue, blue, red]
        case "same name":
            red["name"] = "blue"
        case "nobodys":
            document["tenants"] = [red]
        case "not hex":
            blue["wrapped_key"] = "none"
    with pytest.raises(ValueError, match="no pool map"):
        decode_pool_map_untrusted(json.dumps(document).encode())


# -- erasing ----------------------------------------------------------------------------------------


def every_key_left(pool_map: PoolMap) -> list[SecretKey]:
    """What whoever has the drives and the root key can still come by: secrets of volumes, opened by any key
    that opens them, in any context that the map knows."""
    wrapping: list[SecretKey] = []
    for tenant in pool_map.tenants:
        if not tenant.is_erased:
            wrapping.append(tenant_key(pool_map.pool_id, tenant, ROOT))
    secrets = []
    for volume in pool_map.volumes:
        context, wrapped = volume_context(pool_map.pool_id, volume, volume.key_epoch), volume.wrapped_secret
        for opens in [
            lambda purpose, *rest: ROOT.unwrap(purpose, *rest),
            *(lambda purpose, *rest, key=key: unwrap_secret(key, purpose, *rest) for key in wrapping),
        ]:
            try:
                secrets.append(opens(Purpose.VOLUME, context, bytes.fromhex(wrapped)))
            except WrongKey:
                continue
    return secrets


def slots_that_open(flash: Flash, pool_map: PoolMap, keys: dict[bytes, str]) -> tuple[int, set[str]]:
    """Try every secret on every slot of the media, as each volume's: how many slots there are, and whose
    values opened (by the volume that they were stored in)."""
    slots, opened = 0, set()
    secrets = every_key_left(pool_map)
    for _, offset, block in flash.media():
        if block[:8] != MAGIC:
            continue
        slots += 1
        for secret in secrets:
            for volume in pool_map.volumes:
                codec = SlotCodec(
                    bytes.fromhex(volume.tenant), bytes.fromhex(volume.volume_id),
                    SecretKey(secret.reveal()[32:]), volume.suite, volume.unit_bytes,
                )  # fmt: skip
                for key, stored_in in keys.items():
                    found = codec.open(memoryview(block)[:HEADER_BYTES], key, Place(nguid_of(0), offset))
                    if isinstance(found, OpenSlot):
                        opened.add(stored_in)
    return slots, opened


def test_of_an_erased_tenant_nothing_on_the_media_opens_with_any_key_that_is_left() -> None:
    flash = Flash()
    keys = {key_of(number): ("blue", "red")[number % 2] for number in range(12)}
    for key, volume in keys.items():
        flash.put(volume, key)
    wrapped = flash.pool_map.tenants[0].wrapped_key
    assert any(wrapped.encode() in block for _, _, block in flash.media())
    assert slots_that_open(flash, flash.pool_map, keys) == (12, {"blue", "red"})

    writes = sum(namespace.writes for namespace in flash.namespaces)
    erased = without_key(flash.found(), "blue")
    assert flash.replace(erased) == {}
    assert sum(namespace.writes for namespace in flash.namespaces) == writes + 4, "two copies each, no slot"

    assert flash.found() == erased
    whole = {number: bytearray(2 << 20) for number in range(2)}
    for number, offset, block in flash.media():
        if offset < len(whole[number]):
            whole[number][offset : offset + 4096] = block
        assert wrapped.encode() not in block
    for media in whole.values():
        for piece in range(0, len(wrapped) - 32, 16):
            assert wrapped[piece : piece + 32].encode() not in media, "a part of it, across blocks"
    assert slots_that_open(flash, erased, keys) == (12, {"red"})
    with pytest.raises(ConfigError, match="was erased"):
        erased.secret(erased.volumes[0], ROOT)
    assert without_key(erased, "blue") is erased, "it can be repeated"
    with pytest.raises(ConfigError, match="no tenant green"):
        without_key(erased, "green")


def test_nothing_stays_of_a_longer_map() -> None:
    """Room that a shorter map leaves is overwritten, and not only its beginning."""
    long = planned()
    for number in range(40):
        long, _ = with_tenant(long, f"tenant-{number}", [], ROOT)
    flash = Flash(long)
    short = PoolMap(
        pool_id=long.pool_id, version=99, namespaces=long.namespaces, volumes=(), tenants=long.tenants[:1]
    )
    assert len(Superblock(nguid_of(0), long).encode()) > 8192
    assert not flash.replace(short)
    secret = long.tenants[-1].wrapped_key.encode()[:64]
    text = b"".join(block for _, offset, block in flash.media() if offset < 1 << 20)
    assert secret not in text


def test_a_namespace_that_is_not_reached_is_named_and_done_later() -> None:
    flash = Flash()
    wrapped = flash.pool_map.tenants[0].wrapped_key.encode()
    erased = without_key(flash.pool_map, "blue")
    away = nguid_of(1).hex()
    assert flash.replace(erased, {nguid_of(0).hex(): 0}) == {away: "not reached"}
    for fault in ("down", "broken", "hung"):
        setattr(flash.namespaces[1], fault, True)
        assert list(flash.replace(erased)) == [away]
        setattr(flash.namespaces[1], fault, False)
    still = {number for number, _, block in flash.media() if wrapped in block}
    assert still == {1}
    assert flash.found().tenants[0].is_erased, "whoever reaches both takes the newer map"
    assert flash.replace(without_key(flash.found(), "blue")) == {}
    assert not any(wrapped in block for _, _, block in flash.media())


def test_a_drive_that_keeps_the_old_map_is_found_out() -> None:
    class Lying(MemoryNamespace):
        def store(self, offset: int, parts: Any) -> None:
            if offset != COPY_OFFSETS[1]:
                super().store(offset, parts)

    flash = Flash()
    lying = Lying(SIZE, dict(flash.namespaces[0].blocks))
    flash.namespaces[0] = lying
    left = flash.replace(without_key(flash.pool_map, "blue"))
    assert left == {nguid_of(0).hex(): "what was written is not read back"}


def test_a_drive_of_keys_that_keeps_the_old_map_is_found_out() -> None:
    class Lying(SimKvChannel):
        def kv_store(
            self, namespace: int, key: bytes, parts: Sequence[Buffer], *, only_new: bool = False
        ) -> KvSimPending:
            kept = self._namespaces[namespace].values.get(key)
            return super().kv_store(namespace, key, parts if kept is None else [kept], only_new=only_new)

    scheduler, namespace = StepScheduler(1), SimKvNamespace(16 << 20)
    channel, nguid = Lying(scheduler, [namespace], "one"), nguid_of(0)
    pool_map = plan_pool([], [wish("kv", "blue", 1.0)], ROOT, [(nguid, 16 << 20)])
    assert scheduler.finish(replace_map(channel, pool_map, {nguid.hex(): 0})) == {}
    left = scheduler.finish(replace_map(channel, without_key(pool_map, "blue"), {nguid.hex(): 0}))
    assert left == {nguid.hex(): "what was written is not read back"}


# -- adding -----------------------------------------------------------------------------------------


def test_an_erased_tenant_that_comes_back_finds_nothing_of_what_it_had() -> None:
    flash = Flash()
    flash.put("blue", key_of(1))
    erased = without_key(flash.pool_map, "blue")
    back, fresh = with_tenant(erased, "blue", [], ROOT)
    assert [volume.name for volume in fresh] == ["blue"]
    assert back.version == erased.version + 1
    assert fresh[0].volume_id != flash.pool_map.volumes[0].volume_id
    assert fresh[0].extents == flash.pool_map.volumes[0].extents
    flash.pool_map = back
    flash.volumes["blue"] = flash.open(fresh[0])
    flash.cache = DirectoryCache(1 << 20)
    assert flash.get("blue", key_of(1)) is MissCause.NEVER_STORED
    assert with_tenant(back, "blue", [], ROOT) == (back, ())


def test_a_new_tenant_gets_room_that_nobody_has() -> None:
    pool_map = planned()
    wishes = [wish("green", "green", 0.3), wish("other", "another", 0.3)]
    grown, fresh = with_tenant(pool_map, "green", wishes, ROOT)
    assert [volume.name for volume in fresh] == ["green"]
    assert grown.volumes[:2] == pool_map.volumes
    assert len(grown.secret(fresh[0], ROOT)) == 96
    assert decode_pool_map_untrusted(grown.encode()) == grown, "no two extents overlap"
    assert with_tenant(pool_map, "bare", wishes, ROOT)[1] == ()
    for name, wrong in (
        ("green", wish("red", "green")),
        ("green", wish("green", "green", layout="kv")),
    ):
        with pytest.raises(ConfigError):
            with_tenant(pool_map, name, [wrong], ROOT)
    with pytest.raises(ConfigError, match="no namespace has room"):
        with_tenant(planned(wish("rest", "red", 0.4)), "green", [wish("green", "green", 0.5)], ROOT)


# -- an agent that serves meanwhile -----------------------------------------------------------------


@pytest.mark.expects_log("volume blue was erased")
def test_an_agent_drops_what_was_erased_and_nothing_else(tmp_path: Path) -> None:
    flash = Flash()
    prestage = PrestageCache(1 << 20)
    for volume in ("blue", "red"):
        flash.put(volume, key_of(1))
        settings = flash.volumes[volume].settings
        assert add_staged(prestage, settings.volume_id, key_of(1), 1, memoryview(bytes(4096)))
    blue, channel = flash.volumes["blue"], flash.channel
    half_read, half_written = SlotReader(blue, key_of(1)), SlotWriter(blue, key_of(2), length=len(VALUE))
    into = memoryview(bytearray(64))
    assert channel.run(half_read.read(channel, 0, into, channel.now() + 1)) == 64
    channel.run(half_written.write(channel, 0, memoryview(VALUE)[:100], channel.now() + 1))

    remembered: list[PoolMap] = []
    watch = flash.watch(tmp_path, prestage, followed=remembered.append)
    before = sum(each.reads for each in flash.namespaces)
    channel.run(watch.look(channel))
    channel.run(watch.look(channel))
    assert sum(each.reads for each in flash.namespaces) == before + 1, "one block, once in a while"
    flash.replace(without_key(flash.pool_map, "blue"), {nguid_of(1).hex(): 1})
    channel.clock += EVERY_SECONDS
    channel.run(watch.look(channel))
    assert blue.erased
    assert not flash.volumes["red"].erased
    assert watch.pool_map.tenants[0].is_erased
    assert remembered == [without_key(flash.pool_map, "blue")]

    assert flash.get("blue", key_of(1)) is MissCause.WRONG_KEY
    assert channel.run(half_read.read(channel, 64, into, channel.now() + 1)) == 0
    assert half_read.cause is MissCause.WRONG_KEY
    for writing in (half_written, SlotWriter(blue, key_of(3), length=len(VALUE))):
        with pytest.raises(PutRefused, match="erased"):
            channel.run(writing.write(channel, 100, memoryview(VALUE)[100:], channel.now() + 1))
    assert channel.run(blue.lookup(channel, [key_of(1)], channel.now() + 1)) == [MissCause.NEVER_STORED]
    assert not channel.run(delete(blue, channel, key_of(1), channel.now() + 1))
    assert not prestage.holds(blue.settings.volume_id, key_of(1))
    assert prestage.holds(flash.volumes["red"].settings.volume_id, key_of(1))
    assert flash.get("red", key_of(1)) == VALUE


def test_an_agent_whose_upkeep_is_held_up_names_nothing_for_an_erased_tenant(tmp_path: Path) -> None:
    """By then the directories may be those of the tenant's next volumes."""
    flash = Flash()
    watch = flash.watch(tmp_path)
    flash.channel.run(watch.look(flash.channel))
    flash.put("blue", key_of(1))
    flash.replace(without_key(flash.pool_map, "blue"))
    flash.channel.clock += 10
    for number in range(2, 6):
        with pytest.raises(PutRefused, match="its key was dropped"):
            flash.put("blue", key_of(number))
    assert flash.channel.run(slots_taken(flash.channel, flash.pool_map.volumes[0], NUMBERS)) == 1
    flash.put("red", key_of(1))


@pytest.mark.expects_log("carries pool")
@pytest.mark.expects_log("carries this pool again")
def test_a_foreign_or_older_map_is_not_followed(tmp_path: Path) -> None:
    flash = Flash()
    fabric = Fabric(())
    watch = flash.watch(tmp_path, fabric=fabric)

    def look(times: int) -> None:
        for _ in range(times):
            flash.channel.clock += EVERY_SECONDS
            flash.channel.run(watch.look(flash.channel))

    look(len(NUMBERS))
    assert fabric.taken == {}
    stranger = planned().model_copy(update={"version": 9})
    flash.replace(without_key(stranger, "blue"))
    look(2 * len(NUMBERS))
    assert not any(volume.erased for volume in flash.volumes.values())
    assert fabric.taken == {bytes.fromhex(nguid): stranger.pool_id for nguid in NUMBERS}
    with pytest.raises(PutRefused):
        flash.put("red", key_of(1))
    flash.replace(flash.pool_map)
    look(len(NUMBERS))
    assert fabric.taken == {}
    for fault in ("down", "hung", "broken"):
        setattr(flash.namespaces[0], fault, True)
        flash.channel.clock += 2 * EVERY_SECONDS
        flash.channel.run(watch.look(flash.channel))


@pytest.mark.expects_log("volume kv was erased")
def test_on_kv_namespaces(tmp_path: Path) -> None:
    """The map is one value there, and a Store replaces it."""
    scheduler, namespace = StepScheduler(1), SimKvNamespace(16 << 20)
    channel = SimKvChannel(scheduler, [namespace], "one")
    nguid = nguid_of(0)
    pool_map = plan_pool([], [wish("kv", "blue", 1.0)], ROOT, [(nguid, 16 << 20)])
    assert scheduler.finish(replace_map(channel, pool_map, {nguid.hex(): 0})) == {}
    volume = KvVolume(
        pool_map.settings(pool_map.volumes[0]), pool_map.secret(pool_map.volumes[0], ROOT), Timing()
    )
    writing = KvWriter(volume, key_of(1), length=len(VALUE))
    assert scheduler.finish(writing.write(channel, 0, memoryview(VALUE), channel.now() + 5))
    half_read, into = KvReader(volume, key_of(1)), memoryview(bytearray(64))
    assert scheduler.finish(half_read.read(channel, 0, into, channel.now() + 5)) == 64

    wrapped = pool_map.tenants[0].wrapped_key.encode()
    assert wrapped in namespace.values[RESERVED_KEY]
    assert scheduler.finish(replace_map(channel, without_key(pool_map, "blue"), {nguid.hex(): 0})) == {}
    assert not any(wrapped in bytes(value) for value in namespace.values.values())
    watch = watch_over(pool_map, [volume], tmp_path)
    scheduler.finish(watch.look(channel))
    assert volume.erased
    for reading in (half_read, KvReader(volume, key_of(1))):
        assert scheduler.finish(reading.read(channel, 0, into, channel.now() + 5)) == 0
        assert reading.cause is MissCause.WRONG_KEY
    refused = KvWriter(volume, key_of(2), length=len(VALUE))
    with pytest.raises(PutRefused, match="erased"):
        scheduler.finish(refused.write(channel, 0, memoryview(VALUE), channel.now() + 5))


def test_an_erased_row_is_one_without_a_key() -> None:
    assert MapTenant(name="blue", tenant_id=tenant_id("blue"), wrapped_key="").is_erased
