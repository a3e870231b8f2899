"""What one tenant can learn of another through a door: nothing, by answers, by work and by time."""

from __future__ import annotations

import errno
import gc
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from agent.bench.tenant_probes import auc
from agent.errors import ConfigError
from agent.fs.control.face import CONTROL_ROOT, ControlFace
from agent.fs.interface import Caller, FsError
from agent.fs.kv_face import KV_ROOT, KvFace
from agent.pool.access import serve
from agent.pool.map.document import tenant_id
from agent.pool.read.get import SlotReader
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.steps import settle
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import Timing, VolumeExtent, VolumeSettings
from agent.pool.volume.volume import Volume
from agent.pool.write.put import SlotWriter
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from agent.telemetry import snapshot
from agent.tenancy.visibility import Audience, Members
from host_shim.control_wire import Operation, Outcome, Request, decode_answer_untrusted
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import fixed_secret, nguid_of

CALLER = Caller()
VALUE = b"a value of blue" * 40
SAMPLES = 2000
SETS = 32


def settings_of(name: str, tenant: str, number: int, kind: str = "kv") -> VolumeSettings:
    """Volumes that lie behind each other on the same two namespaces."""
    extents = tuple(VolumeExtent(at, nguid_of(at), (1 + 64 * number) << 20, SETS) for at in range(2))
    identity = random.Random(name).randbytes(16)
    return VolumeSettings(
        name, bytes.fromhex(tenant_id(tenant)), identity, kind, 16384, 1 << 16, "aes-256-gcm", 0, extents
    )


class Shared:
    """One agent's pool with one volume a tenant: they share channel, directories and prestaging."""

    def __init__(self, stored: int = 100) -> None:
        self.namespaces = [MemoryNamespace(1 << 40) for _ in range(2)]
        self.channel = MemoryChannel(self.namespaces)
        self.cache, self.prestage = DirectoryCache(64 << 20), PrestageCache(1 << 20)
        self.volumes = [
            Volume(settings_of(name, name, number), fixed_secret(number), self.cache, Timing())
            for number, name in enumerate(("blue", "red"))
        ]
        self.blue, self.red = self.volumes
        sources = snapshot.Sources(
            pool_id="pool", map_version=lambda: 1, mount="/mnt", door="fuse", volumes=self.volumes,
            fabric=Fabric([Enclosure("shelf")]), directories=self.cache, prestage=self.prestage,
            tallies=lambda: [self.channel.tallies], files=lambda: {"open_files": 3},
            doors=lambda: {"fuse": {"bytes_read": 1}},
        )  # fmt: skip
        audience = Audience("agent", tenants=("red",))
        served = [serve(each) for each in self.volumes]
        own = audience.key_value(served)
        self.status = lambda: snapshot.take(audience.sources(sources, audience.in_status(served)))
        self.kv = KvFace(own, lambda: self.channel, self.prestage)
        self.control = ControlFace(
            own, lambda: self.channel, self.status, lambda *_: Outcome.STARTED, self.prestage
        )
        dice = random.Random(35)
        self.stored = [dice.randbytes(16) for _ in range(stored)]
        for key in self.stored:
            self.put(self.blue, key)
        self.handle = settle(self.control.open(CALLER, CONTROL_ROOT + 1, 0), self.channel).handle

    def put(self, volume: Volume, key: bytes) -> None:
        writing = SlotWriter(volume, key, length=len(VALUE))
        assert self.channel.run(writing.write(self.channel, 0, memoryview(VALUE), self.channel.now() + 5)), (
            "stored"
        )

    def get(self, volume: Volume, key: bytes) -> int:
        reading, into = SlotReader(volume, key, self.prestage), memoryview(bytearray(16384))
        return self.channel.run(reading.read(self.channel, 0, into, self.channel.now() + 1))

    def ask(self, operation: Operation, volume: str, key: bytes) -> bytes:
        """The answer of red's session, byte for byte."""
        lengths = (len(VALUE),) if operation is Operation.PUT else ()
        asked = Request(operation, 7, volume, (key,), lengths=lengths).encode()
        settle(self.control.write(CONTROL_ROOT + 1, self.handle, 0, memoryview(asked)), self.channel)
        room = memoryview(bytearray(65536))
        count = settle(self.control.read(CONTROL_ROOT + 1, self.handle, 0, room), self.channel)
        return bytes(room[:count])

    def work(self, what: Callable[[], Any]) -> tuple[Any, tuple[int, ...]]:
        """What came of it, and the commands and bytes that it cost on flash."""
        before = self._counts()
        came = what()
        return came, tuple(now - then for now, then in zip(self._counts(), before, strict=True))

    def _counts(self) -> tuple[int, ...]:
        return (
            *(each.reads for each in self.namespaces),
            *(each.writes for each in self.namespaces),
            self.channel.tallies[""].flash_bytes_read,
        )


@pytest.fixture
def shared() -> Shared:
    return Shared()


def test_a_door_shows_the_volumes_of_its_tenants(shared: Shared) -> None:
    listed = settle(shared.kv.readdir(KV_ROOT, 0, 2), shared.channel)
    assert [entry.name for entry in listed] == [b"red"]
    said = shared.status()
    assert [volume["name"] for volume in said["volumes"]] == ["red"]
    assert "blue" not in str(said)
    # What all have a part in tells of the others' traffic.
    assert said["memory"] is None
    assert not {"flash_bytes_read", "flash_bytes_written"} & set(said["totals"])
    assert said["files"] is None
    assert said["doors"] == {}
    total = settle(shared.kv.statfs(KV_ROOT), shared.channel)
    assert total.blocks == shared.red.settings.slots * 4


def test_anothers_volume_is_answered_as_one_that_there_is_not(shared: Shared) -> None:
    key = shared.stored[0]
    for operation in (
        Operation.GET, Operation.PUT, Operation.EXISTS, Operation.PIN, Operation.DELETE, Operation.PRESTAGE,
    ):  # fmt: skip
        theirs, work = shared.work(lambda op=operation: shared.ask(op, "blue", key))
        nobodys, work_for_nobody = shared.work(lambda op=operation: shared.ask(op, "grey", key))
        assert theirs == nobodys
        assert work == work_for_nobody == (0,) * 5
    refusals = []
    for name in (b"blue", b"grey"):
        with pytest.raises(FsError) as caught:
            shared.kv.lookup(CALLER, KV_ROOT, name)
        refusals.append((caught.value.errno, str(caught.value)))
    assert refusals[0] == refusals[1]


def test_anothers_key_costs_what_a_key_costs_that_nobody_stored(shared: Shared) -> None:
    dice = random.Random(7)
    costs: dict[bool, set[Any]] = {True: set(), False: set()}
    for number in range(200):
        theirs = number % 2 == 0
        key = shared.stored[number // 2] if theirs else dice.randbytes(16)
        count, get = shared.work(lambda key=key: shared.get(shared.red, key))
        answer, exists = shared.work(lambda key=key: shared.ask(Operation.EXISTS, "red", key))
        assert count == 0
        costs[theirs].add((sum(get[:2]), sum(get[2:4]), get[4], sum(exists[:2]), exists[4]))
        assert decode_answer_untrusted(answer).body == bytes([Outcome.NEVER_STORED])
    assert costs[True] == costs[False]


def _times(samples: list[tuple[int, bytes]], what: Callable[[bytes], object]) -> list[list[float]]:
    """CPU time of this thread for each sample, by its class."""
    times: list[list[float]] = [[], []]
    gc.collect()
    gc.disable()
    try:
        for kind, key in samples:
            began = time.thread_time_ns()
            what(key)
            times[kind].append(time.thread_time_ns() - began)
    finally:
        gc.enable()
    return times


@pytest.mark.parametrize("operation", ["get", "exists"])
def test_time_does_not_tell_anothers_keys_from_those_that_nobody_stored(operation: str) -> None:
    """Red asks for keys that blue has stored, and for others; who sees only how long it took cannot tell
    which is which. An agent that also looked in blue's volume would be found out by the same measure.

    The CPU time of one thread, the classes shuffled together: noise hits both alike. With so many samples
    an AUC of equal rows has a standard deviation of 0.009.
    """
    shared = Shared(SAMPLES)
    dice = random.Random(f"timing {operation}")
    what: Callable[[bytes], object] = (
        (lambda key: shared.get(shared.red, key))
        if operation == "get"
        else (lambda key: shared.ask(Operation.EXISTS, "red", key))
    )
    for _ in range(4 * SETS):  # Its directories are remembered before, as those of a volume in use are.
        what(dice.randbytes(16))
    # Each key comes once: the time also depends on the key itself, which must not be taken for its class.
    unknown = [dice.randbytes(16) for _ in shared.stored]
    samples = [(kind, key) for kind, keys in enumerate((unknown, shared.stored)) for key in keys]
    dice.shuffle(samples)
    strangers, theirs = _times(samples, what)
    assert auc(strangers, theirs) == pytest.approx(0.5, abs=0.05)

    stored = set(shared.stored)

    def leaky(key: bytes) -> None:
        what(key)
        if key in stored:
            shared.get(shared.blue, key)

    strangers, theirs = _times(samples[:1000], leaky)
    assert auc(strangers, theirs) > 0.75


def test_the_measure_is_right() -> None:
    assert auc([1, 2, 3], [4, 5, 6]) == 1
    assert auc([4, 5, 6], [1, 2, 3]) == 0
    assert auc([1, 1, 2], [1, 1, 2]) == 0.5
    assert auc([1, 3], [2]) == 0.5
    assert auc([1, 2], [2, 3]) == (1 + 1 + 0.5 + 1) / 4


# -- a volume that is erased while it is served -----------------------------------------------------


def test_an_erased_volume_is_as_one_that_there_is_not(shared: Shared) -> None:
    key, channel = random.Random(1).randbytes(16), shared.channel
    shared.put(shared.red, key)
    folder = settle(shared.kv.lookup(CALLER, KV_ROOT, b"red"), channel).attributes.ino
    value = settle(shared.kv.lookup(CALLER, folder, key.hex().encode()), channel).attributes.ino
    reader = settle(shared.kv.open(CALLER, value, os.O_RDONLY), channel).handle
    into = memoryview(bytearray(100))
    assert settle(shared.kv.read(value, reader, 0, into), channel) == 100
    made, opened = settle(shared.kv.create(CALLER, folder, b"new", 0o644, os.O_WRONLY), channel)
    writer, new = opened.handle, made.attributes.ino
    assert settle(shared.kv.write(new, writer, 0, memoryview(b"half")), channel) == 4
    assert shared.ask(Operation.EXISTS, "red", key) != shared.ask(Operation.EXISTS, "grey", key)

    shared.red.change(erased=True)
    for operation in (Operation.GET, Operation.EXISTS, Operation.DELETE):
        assert shared.ask(operation, "red", key) == shared.ask(operation, "grey", key)
    assert list(settle(shared.kv.readdir(KV_ROOT, 0, 2), channel)) == []
    assert settle(shared.kv.statfs(KV_ROOT), channel).blocks == 0
    assert shared.status()["volumes"] == []
    for code, gone in (
        (errno.ENOENT, lambda: shared.kv.lookup(CALLER, KV_ROOT, b"red")),
        (errno.ENOENT, lambda: shared.kv.lookup(CALLER, folder, b"new")),
        (errno.ENOENT, lambda: shared.kv.create(CALLER, folder, b"other", 0o644, os.O_WRONLY)),
        (errno.ENOENT, lambda: shared.kv.getattr(CALLER, folder, None)),
        (errno.ENOENT, lambda: shared.kv.getattr(CALLER, value, None)),
        (errno.ENOENT, lambda: shared.kv.open(CALLER, value, os.O_RDONLY)),
        (errno.EIO, lambda: shared.kv.read(value, reader, 100, into)),
        (errno.EIO, lambda: shared.kv.write(new, writer, 4, memoryview(b"more"))),
        (errno.EIO, lambda: shared.kv.flush(new, writer)),
    ):
        with pytest.raises(FsError) as caught:
            settle(gone(), channel)
        assert caught.value.errno == code
    settle(shared.kv.release(value, reader), channel)
    settle(shared.kv.release(new, writer), channel)


# -- who a door is for ------------------------------------------------------------------------------


@dataclass
class Named:
    """As much of a volume as an audience looks at."""

    settings: VolumeSettings


def test_files_are_shown_where_all_of_their_volumes_are_the_doors_own() -> None:
    served, blocks = Named(settings_of("a", "red", 0)), Named(settings_of("b", "blue", 1, "files"))
    volumes: list[Any] = [served, blocks]
    assert Audience("agent").shows_files(volumes)
    assert not Audience("agent", ("red",)).shows_files(volumes)
    assert Audience("agent", ("blue", "red")).shows_files(volumes)
    assert Audience("agent", ("red",)).key_value(volumes) == [served]
    assert Audience("agent", ("red",), ("other",)).key_value(volumes) == []
    assert Audience("agent").is_for_all


def test_who_is_not_in_the_pool_is_refused_and_who_was_erased_is_not_missed() -> None:
    members = Members(frozenset({bytes.fromhex(tenant_id("erased"))}), frozenset({"its-volume"}))
    Audience("agent", ("erased",), ("its-volume",)).check(members)
    with pytest.raises(ConfigError, match="no tenant of this pool"):
        Audience("agent", ("typo",)).check(members)
    with pytest.raises(ConfigError, match="no key-value or shared volume"):
        Audience("virtiofs", (), ("typo",)).check(members)
