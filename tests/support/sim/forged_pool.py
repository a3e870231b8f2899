"""A pool one enclosure of which lies about the map, to each who looks as it likes, while verbs change it.

Namespaces 0 (blocks), 2 (keys) and 4 (blocks, blank at first) are an honest enclosure's, 1 and 3 the
attacker's. Two agents serve; `ForgedPool.run` takes steps by chance, and says after each what must hold:

* every copy on the honest enclosure bears the root key's seal, and is the newest map that a verb has made;
* both agents, once they have looked at each namespace, go by that map: its limits, extents and namespaces;
* they serve every volume of it whose tenant has a key, and no other; a start serves the same;
* what lies on the honest enclosure is read and written; nothing else than an error of ours is raised;
* a block of a file is given up by no map but that one.

When the enclosure is honest again and one verb has run, all of its copies are the pool's own.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from agent.attach.map_history import MapHistory, map_seal
from agent.attach.map_watch import EVERY_SECONDS, MapWatch
from agent.errors import G35Error
from agent.membership.join import join, settle, unsettled
from agent.pool.access import serve
from agent.pool.errors import PutRefused
from agent.pool.kv.volume import KvVolume
from agent.pool.map.commit import Change, change_map, simply
from agent.pool.map.document import PoolMap, VolumeWish, plan_pool
from agent.pool.map.inspect import Inspection, inspect, newest_map
from agent.pool.map.key_epochs import rotating, with_new_data_keys, without_earlier_keys
from agent.pool.map.kv_superblock import inspect_kv
from agent.pool.map.map_seal import MapSeal
from agent.pool.map.replicas import KEY_PLACES, read_copies, write_superblock
from agent.pool.map.superblock import COPY_OFFSETS
from agent.pool.map.tenant_changes import find_tenant, with_limits, with_tenant, without_key
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.volume import PoolVolume, Timing, Volume
from agent.remote.fabric import Fabric
from agent.tenancy.limits import TenantLimits, limits_of
from tests.support.pool.memory_pool import nguid_of
from tests.support.sim.forgeries import ROOT, forgery
from tests.support.sim.two_faced_flash import TwoFacedChannel, TwoFacedNamespace

SIZE = 24 << 20
FORGERIES = 4
"""One after the other, before all that must hold is looked at."""
BLOCKS = [(nguid_of(0), SIZE), (nguid_of(1), SIZE)]
KEYS = [(nguid_of(2), SIZE), (nguid_of(3), SIZE)]
NEWCOMER = (nguid_of(4), SIZE)
NGUIDS = [nguid_of(number) for number in range(5)]
HONEST, FORGED = (0, 2, 4), (1, 3)
ON_KEYS = (2, 3)
WISHES = [
    VolumeWish(name="blue", tenant="blue", value_bytes=1 << 16, share=0.2),
    VolumeWish(name="red", tenant="red", value_bytes=1 << 16, share=0.2, copies=2),
    VolumeWish(name="files", tenant="red", kind="files", value_bytes=1 << 16, share=0.2),
    VolumeWish(name="keys", tenant="green", value_bytes=1 << 16, share=1.0, layout="kv"),
]


class Viewer:
    """Somebody who reaches the pool's namespaces, and what the attacker shows him."""

    def __init__(self, shared: list[TwoFacedNamespace]) -> None:
        self.namespaces = [TwoFacedNamespace(SIZE, blocks=each.blocks, values=each.values) for each in shared]
        self.channel = TwoFacedChannel(self.namespaces)
        self.channel.clock = time.monotonic()

    def look_round(self) -> list[Inspection]:
        look = [
            inspect_kv(self.channel, number, nguid)
            if number in ON_KEYS
            else inspect(self.channel, number, nguid, SIZE)
            for number, nguid in enumerate(NGUIDS)
        ]
        return [self.channel.run(each) for each in look]


class AgentOfPool:
    """What an agent has to do with pool maps, put together as in agent/service/agent.py."""

    def __init__(self, viewer: Viewer, state: Path) -> None:
        self.viewer, self.state, self.channel = viewer, state, viewer.channel
        self.seal = map_seal(ROOT, state)
        pool_map = newest_map(viewer.look_round(), self.seal)
        self.seen = MapHistory(state)
        self.seen.refuse(pool_map)
        pool_map = self.seen.believed(pool_map)
        cache = DirectoryCache(16 << 20)
        self.volumes: list[PoolVolume] = []
        for row in pool_map.volumes:
            if not pool_map.is_erased(row):
                settings, secret = pool_map.settings(row), pool_map.secret(row, ROOT)
                self.volumes.append(
                    KvVolume(settings, secret, Timing())
                    if settings.shares
                    else Volume(settings, secret, cache, Timing())
                )
        self.tenants = TenantLimits(pool_map, self.volumes, 2, ROOT, state)
        self.watch = MapWatch(
            pool_map,
            self.volumes,
            PrestageCache(0),
            self.seen,
            ROOT,
            Fabric(()),
            self.seal,
            self.tenants.follow,
        )

    def look(self) -> None:
        """At each namespace at least once."""
        for _ in range(len(self.watch.pool_map.namespaces) + 1):
            self.channel.clock += 1.5 * EVERY_SECONDS
            self.channel.run(self.watch.look(self.channel))
            self.channel.run(self.tenants.look(self.channel))

    def mend(self) -> None:
        """As membership = "auto" does where copies differ."""
        change = simply(lambda it: it)
        ours = [
            each
            for each in self.viewer.look_round()
            if each.superblock and each.superblock.pool_map.pool_id == self.watch.pool_map.pool_id
        ]
        pool_map = newest_map(ours, self.seal)
        self.channel.run(
            change_map(self.channel, pool_map, NUMBERS, change, all_of_them=False, seal=self.seal)
        )

    def put(self, volume: PoolVolume, key: bytes, value: bytes) -> None:
        """Raises PutRefused."""
        writing = serve(volume).writer(key, length=len(value))
        assert self.channel.run(writing.write(self.channel, 0, memoryview(value), self.channel.now() + 5))

    def get(self, volume: PoolVolume, key: bytes) -> bytes | None:
        into, reading = bytearray(1 << 16), serve(volume).reader(key)
        count = self.channel.run(reading.read(self.channel, 0, memoryview(into), self.channel.now() + 5))
        return bytes(into[:count]) if count else None

    def close(self) -> None:
        self.tenants.rotation.close()


NUMBERS = {nguid.hex(): number for number, nguid in enumerate(NGUIDS)}


class ForgedPool:
    """See the module's docstring. Raises AssertionError."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self._rng, self._folder = rng, folder
        self._shared = [TwoFacedNamespace(SIZE) for _ in NGUIDS]
        self._verb = Viewer(self._shared)
        first = MapSeal(ROOT).put(plan_pool(BLOCKS, WISHES, ROOT, KEYS))
        self._verb_seal = MapSeal(ROOT, own=first.pool_id)
        self.maps = [first]
        for number in range(4):
            places = KEY_PLACES if number in ON_KEYS else COPY_OFFSETS
            self._verb.channel.run(
                write_superblock(self._verb.channel, number, NGUIDS[number], first, places)
            )
        self.agents: list[AgentOfPool] = []
        for number in range(2):
            state = folder / f"state-{number}"
            state.mkdir()
            self.agents.append(AgentOfPool(Viewer(self._shared), state))
        self.counts: Counter[str] = Counter()
        self._values: dict[tuple[str, bytes], bytes] = {}

    @property
    def truth(self) -> PoolMap:
        """The newest map that a verb has made."""
        return self.maps[-1]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            does = self._rng.choices(
                [self._forge, self._heal, self._change, self._restart, self._mend, self._store],
                [8, 2, 4, 2, 2, 2],
            )[0]
            self.counts[does.__name__] += 1
            does()
            self._check()
        self._heal()
        self._change_by("limits", simply(lambda base: with_limits(base, "red", quota_slots=4095)))
        self._check()
        for number in range(len(self.truth.namespaces)):
            assert self._copies(number) == [self.truth] * (1 if number in ON_KEYS else 2)
        for number in range(2):
            self._restart(number)
        self._check()

    def close(self) -> None:
        for agent in self.agents:
            agent.close()

    # -- steps --------------------------------------------------------------------------------------

    def _viewers(self) -> list[Viewer]:
        return [self._verb, *(agent.viewer for agent in self.agents)]

    def _forge(self) -> None:
        for _ in range(FORGERIES):
            self._lie()
            for agent in self.agents:
                agent.look()
                assert agent.watch.pool_map == self.truth

    def _lie(self) -> None:
        viewers = self._viewers()
        for number in self._rng.sample(FORGED, self._rng.choice((1, 2))):
            kind, data = forgery(self._rng, self.maps, NGUIDS[number])
            self.counts[kind] += 1
            for viewer in self._rng.sample(viewers, self._rng.randint(1, len(viewers))):
                face = viewer.namespaces[number]
                face.obeys, face.deaf = self._rng.random() < 0.5, self._rng.random() < 0.2
                offsets = self._rng.sample(COPY_OFFSETS, self._rng.choice((1, 2)))
                for offset in (0,) if number in ON_KEYS else offsets:
                    face.show(offset, data)

    def _heal(self) -> None:
        for viewer in self._viewers():
            for number in FORGED:
                face = viewer.namespaces[number]
                face.shown, face.obeys, face.deaf = {}, True, False

    def _restart(self, number: int | None = None) -> None:
        number = self._rng.randrange(2) if number is None else number
        before = self.agents[number]
        before.close()
        self.agents[number] = AgentOfPool(before.viewer, before.state)

    def _mend(self) -> None:
        agent = self._rng.choice(self.agents)
        agent.mend()
        self._take_newest()

    def _store(self) -> None:
        agent = self._rng.choice(self.agents)
        for volume in agent.volumes:
            key, value = self._rng.randbytes(16), self._rng.randbytes(100)
            if volume.erased:
                continue
            try:
                agent.put(volume, key, value)
            except PutRefused:
                assert self._is_forged(agent, volume, key), f"{volume.settings.name} refuses a put"
                self.counts["puts refused"] += 1
                continue
            self._values[volume.settings.volume_id.hex(), key] = value
            self.counts["puts"] += 1

    def _change(self) -> None:
        root, rng = ROOT, self._rng
        what = rng.choice(("limits", "limits", "erase", "add", "begin", "end", "join", "settle"))
        self.counts[what] += 1
        match what:
            case "limits":
                self._change_by(
                    what, simply(lambda base: with_limits(base, "red", quota_slots=rng.randrange(1000, 4000)))
                )
            case "erase":
                name = rng.choice(("blue", "green"))
                done = self._change_by(what, simply(lambda base: without_key(base, name)))
                assert done, "an erasure reaches what is honest"
                assert find_tenant(self.truth, name).is_erased
            case "add":
                name = rng.choice(("blue", "green"))
                self._change_by(what, simply(lambda base: with_tenant(base, name, [], root)[0]))
            case "begin":
                self._change_by(
                    what,
                    simply(
                        lambda base: (
                            base if self._cannot_rotate(base) else with_new_data_keys(base, "blue", root)
                        )
                    ),
                )
            case "end":
                ended = {each.volume_id for each in rotating(self.truth, "blue")}
                self._change_by(
                    what,
                    simply(
                        lambda base: without_earlier_keys(base, ended) if rotating(base, "blue") else base
                    ),
                )
                self._values = {at: value for at, value in self._values.items() if at[0] not in ended}
            case "join" if len(self.truth.namespaces) == 4:
                self._by_steps(
                    lambda pool_map: join(
                        self._verb.channel, pool_map, [NEWCOMER], NUMBERS, seal=self._verb_seal
                    )
                )
            case "settle" if unsettled(self.truth):
                self._by_steps(
                    lambda pool_map: settle(self._verb.channel, pool_map, NUMBERS, self._verb_seal)
                )
                self._values = {}

    def _cannot_rotate(self, base: PoolMap) -> bool:
        return find_tenant(base, "blue").is_erased or bool(rotating(base, "blue"))

    def _by_steps(self, steps: Callable[[PoolMap], object]) -> None:
        try:
            pool_map = newest_map(self._verb.look_round(), self._verb_seal)
            self._verb.channel.run(steps(pool_map))  # type: ignore[arg-type]
        except G35Error:
            self.counts["verbs that failed"] += 1
        self._take_newest()

    def _change_by(self, what: str, change: Change) -> bool:
        """As `g35 tenant` does; whether the map was changed or was as is wanted."""
        channel, is_erasure = self._verb.channel, what == "erase"
        try:
            pool_map = newest_map(self._verb.look_round(), self._verb_seal)
            done = channel.run(
                change_map(
                    channel, pool_map, NUMBERS, change, all_of_them=not is_erasure, seal=self._verb_seal
                )
            )
            if done.left:
                self.counts["verbs not everywhere"] += 1
                assert {NUMBERS[each] for each in done.left} <= {*FORGED}
        except G35Error:
            self.counts["verbs that failed"] += 1
            return False
        finally:
            self._take_newest()
        return True

    # -- what must hold -----------------------------------------------------------------------------

    def _copies(self, number: int) -> list[PoolMap | None]:
        """What lies on a namespace, whatever anybody is shown."""
        truth = Viewer(self._shared)
        member = next(each for each in self.truth.namespaces if each.nguid == NGUIDS[number].hex())
        return [each.pool_map for each in truth.channel.run(read_copies(truth.channel, number, member, {}))]

    def _take_newest(self) -> None:
        """What verbs have written to the honest enclosure is the truth from now on."""
        (found,) = {each.encode() for each in self._copies(0) if each is not None}
        newest = next(each for each in self._copies(0) if each is not None and each.encode() == found)
        assert newest.version >= self.truth.version
        if newest != self.truth:
            assert MapSeal(ROOT).holds(newest), "a map that nobody with the key has made"
            self.maps.append(newest)
            live = {each.volume_id for each in newest.volumes if not newest.is_erased(each)}
            self._values = {at: value for at, value in self._values.items() if at[0] in live}

    def _check(self) -> None:
        for number in HONEST[:2] if len(self.truth.namespaces) == 4 else HONEST:
            assert all(each == self.truth for each in self._copies(number)), f"namespace {number}"
        for agent in self.agents:
            for volume in agent.volumes:
                if isinstance(volume, Volume) and volume.newest_map is not None:
                    by = agent.channel.run(volume.newest_map(agent.channel, agent.channel.now() + 5))
                    assert by is None or agent.watch.pool_map == self.truth
            agent.look()
            self._check_agent(agent)

    def _check_agent(self, agent: AgentOfPool) -> None:
        truth = self.truth
        assert agent.watch.pool_map == truth, f"{agent.watch.pool_map.version} and not {truth.version}"
        rows = {each.volume_id: each for each in truth.volumes if not truth.is_erased(each)}
        for volume in agent.volumes:
            identity = volume.settings.volume_id.hex()
            assert volume.erased == (identity not in rows), volume.settings.name
            if volume.erased:
                continue
            settings = truth.settings(rows[identity])
            assert volume.settings == settings
            for (of, key), value in self._values.items():
                if of == identity:
                    found = agent.get(volume, key)
                    assert found in (value, None), "a wrong value"
                    assert found is not None or self._is_forged(agent, volume, key), "a value is lost"
        for row in agent.tenants.snapshot():
            tenant, limits = find_tenant(truth, row["name"]), limits_of(find_tenant(truth, row["name"]))
            assert (row["slots_max"], row["bytes_max"]) == (limits.slots, limits.bytes)
            assert row["bandwidth_max"] == tenant.bandwidth

    def _is_forged(self, agent: AgentOfPool, volume: PoolVolume, key: bytes) -> bool:
        """Whether a key may lie on the attacker's enclosure."""
        pseudonym = volume.placement.pseudonym(key)
        if isinstance(volume, KvVolume):
            return volume.namespace_of(pseudonym) in FORGED
        return any(place.namespace in FORGED for place in volume.places(pseudonym))
