"""`[pool] membership = "auto"`: newcomers join by themselves, or do not, over real sessions to enclosures."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trio

from agent.attach.connect import connected
from agent.attach.inspect_namespaces import look_round
from agent.config.configuration import Configuration, PoolSection
from agent.errors import G35Error
from agent.inline.secrets import RootKey, SecretKey
from agent.membership import auto_join
from agent.membership.auto_join import REST_SECONDS, AutoJoin, Patience
from agent.membership.join import unsettled
from agent.pool.late_answers import wait_for
from agent.pool.map.document import PoolMap, VolumeWish, plan_pool
from agent.pool.map.inspect import newest_map
from agent.pool.map.map_seal import MapSeal
from agent.pool.map.replicas import write_superblock
from agent.pool.map.tenant_changes import without_key
from agent.remote.channel import WorkerChannel
from agent.remote.fabric import Fabric
from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from nvmeof.controller.subsystem import Subsystem
from nvmeof.wire.log_page import DiscoveryEntry
from tests.support.processes import Processes
from tests.support.waiting import LATE_SESSION, wait_until

pytestmark = pytest.mark.expects_log("not in the pool", LATE_SESSION)
"""The sessions say so of newcomers."""

ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
DRIVE_BYTES = 24 << 20
WISHES = [
    VolumeWish(name="blue", tenant="blue", value_bytes=65536, share=0.4),
    VolumeWish(name="red", tenant="red", value_bytes=65536, share=0.4),
]


def test_newcomers_wait_until_none_has_come_or_gone_for_a_while() -> None:
    patience = Patience(10, lambda: 0.5)
    assert not patience.is_time(set(), 0)
    assert not patience.is_time({"a"}, 1)
    assert not patience.is_time({"a"}, 15)
    assert not patience.is_time({"a", "b"}, 15.5)
    assert not patience.is_time({"a", "b"}, 30)
    assert patience.is_time({"a", "b"}, 30.6)
    patience.rest(31)
    assert not patience.is_time({"a", "b"}, 31)
    assert patience.is_time({"a", "b"}, 31 + REST_SECONDS)
    assert not patience.is_time({"a"}, 32 + REST_SECONDS)


CONNECTED_SECONDS = 20.0


def channel_of(fabric: Fabric, number: int) -> WorkerChannel:
    """Connected, for a request waits some milliseconds only for its queue."""
    channel = WorkerChannel(fabric, number)
    channel.connect_ahead(CONNECTED_SECONDS)
    return channel


class Rig:
    """A pool on some drives, and what lets newcomers in of two agents, on queues of their own."""

    def __init__(self, fabric: Fabric, members: set[bytes]) -> None:
        self.fabric = fabric
        self.channel = channel_of(fabric, 1)
        # All that is reached now is the pool.
        drives = [
            (each.nguid, each.size_bytes) for enclosure in fabric.enclosures for each in enclosure.namespaces
        ]
        drives = [each for each in drives if each[0] in members]
        self.pool_map = MapSeal(ROOT).put(plan_pool(drives, WISHES, ROOT))
        fabric.adopt([nguid for nguid, _ in drives])
        for number, (nguid, _) in enumerate(drives):
            self.channel.run(write_superblock(self.channel, number, nguid, self.pool_map))
        section = PoolSection(membership="auto", join_after_s=1, rebalance=1)
        self.autos = [
            AutoJoin(section, fabric, ROOT, lambda: self.pool_map, lambda: 0, MapSeal(ROOT)) for _ in range(2)
        ]
        self.auto_channels = [channel_of(auto.view, 2 + number) for number, auto in enumerate(self.autos)]
        self.now = 0.0

    def turn(self, auto: int = 0, seconds: float = 3.0) -> None:
        self.now += seconds
        self.autos[auto].turn(self.auto_channels[auto], self.now)

    def found(self) -> PoolMap:
        view = Fabric(self.fabric.enclosures)
        channel = channel_of(view, 4)
        try:
            return newest_map([each for _, _, each in look_round(view, channel) if each.superblock])
        finally:
            channel.close()

    def follow(self) -> PoolMap:
        """As the agent's map watch does."""
        self.pool_map = self.found()
        self.fabric.adopt([bytes.fromhex(each.nguid) for each in self.pool_map.namespaces])
        return self.pool_map

    def close(self) -> None:
        for channel in (self.channel, *self.auto_channels):
            channel.close()


def with_rig(folder: Path, work: Callable[[Rig], None], *enclosures: Enclosure) -> None:
    """Connect to the enclosures, the first of which has the pool's drives, and do blocking work there."""
    sections = [
        {"name": each.settings.name, "address": "127.0.0.1", "port": each.port,
         "nqn": each.settings.subsystem_nqn}
        for each in enclosures
    ]  # fmt: skip
    (folder / "state").mkdir(exist_ok=True)
    configuration = Configuration.model_validate(
        {
            "agent": {"mount": folder / "mnt", "state": folder / "state", "key_file": folder / "key"},
            "enclosures": sections,
        }
    )

    async def main() -> None:
        async with connected(configuration, 4) as supervisor:
            fabric = supervisor.fabric

            def on_thread() -> None:
                rig = Rig(fabric, {each.nguid for each in fabric.enclosures[0].namespaces})
                try:
                    work(rig)
                finally:
                    rig.close()

            with ThreadPoolExecutor(1) as pool:  # trio would keep its own thread for a while
                future = pool.submit(on_thread)
                done, token = trio.Event(), trio.lowlevel.current_trio_token()
                future.add_done_callback(lambda _: token.run_sync_soon(done.set))
                await done.wait()
            future.result()

    trio.run(main)


def enclosure(name: str, drives: int = 1) -> Enclosure:
    return Enclosure(EnclosureSettings(name=name, drives=drives, drive_bytes=DRIVE_BYTES))


@pytest.mark.expects_log("does not join by itself")
def test_blank_ones_join_the_pool_is_settled_and_what_carries_something_is_refused(tmp_path: Path) -> None:
    def work(rig: Rig) -> None:
        strays = sorted(rig.fabric.strays)
        assert len(strays) == 2
        foreign = next(n for n in strays if rig.fabric.strays[n] == "foreign")
        rig.fabric.adopt([*rig.fabric.nguids, bytes.fromhex(foreign)])
        something = rig.channel.write(len(rig.fabric.nguids) - 1, 8192, [b"\xee" * 4096])
        assert rig.channel.run(wait_for(rig.channel, something, rig.channel.now() + 10)) is None
        rig.follow()
        rig.turn(seconds=0.1)
        assert rig.found().version == 1, "not before join_after_s is over"
        rig.turn()
        assert rig.found().version == 2
        assert list(rig.autos[0].snapshot()["newcomers_refused"]) == [foreign]
        assert rig.autos[0].joined == 1
        # Another agent, which has yet to see the map, finds nothing to do.
        rig.turn(1)
        rig.turn(1)
        assert rig.found().version == 2
        assert [len(each.extents) for each in rig.follow().volumes] == [3, 3]
        assert unsettled(rig.pool_map)
        rig.turn(seconds=20)
        assert rig.autos[0].settles == 1
        assert not unsettled(rig.follow())
        rig.turn(seconds=100)
        assert rig.found().version == 3, "the foreign one is left alone"

    with enclosure("pool", 2) as pool, enclosure("two") as two, enclosure("foreign") as foreign:
        with_rig(tmp_path, work, pool, two, foreign)


@pytest.mark.expects_log("does not join by itself: it carries something")
def test_two_agents_at_the_same_moment_let_a_namespace_in_once(tmp_path: Path) -> None:
    """The one that looks while the other writes its superblock finds something, and leaves it alone."""

    def work(rig: Rig) -> None:
        for number in range(2):
            rig.turn(number, 0)
        rig.now += 3
        threads = [threading.Thread(target=rig.turn, args=(number, 0)) for number in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(30)
        assert rig.follow().version == 2
        assert len(rig.pool_map.namespaces) == 3
        rig.turn(0, 100)
        assert rig.follow().version == 3, "settled"
        rig.turn(0, 100)
        assert not rig.autos[0]._differed, "every copy is the same"

    with enclosure("pool", 2) as pool, enclosure("two") as two:
        with_rig(tmp_path, work, pool, two)


def test_a_namespace_that_missed_an_erasure_gets_the_map_when_it_is_back(tmp_path: Path) -> None:
    def work(rig: Rig) -> None:
        erased = MapSeal(ROOT).put(without_key(rig.pool_map, "blue"))
        rig.channel.run(write_superblock(rig.channel, 0, rig.fabric.nguids[0], erased))
        rig.follow()
        for _ in range(2):
            rig.turn(seconds=auto_join.MEND_SECONDS)
        assert rig.autos[0].mended == 1
        rig.turn(seconds=auto_join.MEND_SECONDS)
        assert not rig.autos[0]._differed
        assert rig.found() == erased
        rig.pool_map = erased.model_copy(update={"version": 9})
        rig.autos[0]._differed = True
        with pytest.raises(G35Error, match="newest pool map is away"):
            rig.turn(seconds=auto_join.MEND_SECONDS)

    with enclosure("pool", 2) as pool:
        with_rig(tmp_path, work, pool)


def test_a_drive_joins_under_an_agent_by_itself(processes: Processes, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"

    def status() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / "mnt/.g35/status.json").read_text())
        return found["pool"]

    with enclosure("one", 2) as one, enclosure("two") as two:
        config.write_text(
            f"""
[agent]
mount = "{tmp_path}/mnt"
state = "{tmp_path}/state"
key_file = "{tmp_path}/root.key"
[pool]
membership = "auto"
join_after_s = 0.5
[[discovery]]
name = "pod"
address = "127.0.0.1"
port = {one.port}
[[volumes]]
name = "kv"
value_size = "64K"
share = 0.9
"""
        )
        assert processes.g35("key", "new", tmp_path / "root.key").process.wait(60) == 0
        assert processes.g35("pool", "format", "--config", config).process.wait(60) == 0
        agent = processes.g35("agent", "--config", config)
        agent.wait_for_line("ready", 60)
        assert status()["membership"] == "auto"
        nqn = two.settings.subsystem_nqn
        one.target.add_subsystem(Subsystem(nqn, serial="s"))
        one.target.add_port(DiscoveryEntry("127.0.0.1", str(two.port), subsystem_nqn=nqn))
        # Half a minute passes between two tries, and on a busy machine the first may fail.
        wait_until(lambda: status()["namespaces"] == 3, 90, "the newcomer to join")
        wait_until(lambda: status()["joins"] == 1, 30, "the join to be over")
        assert status()["joined_namespaces"] == 1
        assert status()["volumes_unsettled"] == ["kv"], "nobody has moved anything"
        assert agent.stop(30) == 0
