"""Paths by discovery that have to be shown: a second port of an enclosure, and a copy under its own name."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from agent.config.configuration import DiscoverySection, EnclosureSection
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.map.document import VolumeWish, plan_pool
from agent.pool.map.replicas import KEY_PLACES, write_superblock
from agent.remote.channel import WorkerChannel
from agent.remote.fabric import Fabric
from agent.remote.path_prober import PathProber
from agent.remote.supervisor import Supervisor
from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from nvmeof.wire.log_page import DiscoveryEntry
from tests.support.nvme.nvme_ends import HOST, HOST_ID

DRIVES = {"drives": 1, "kv_drives": 1, "drive_bytes": 16 << 20}
WISHES = [
    VolumeWish(name="v", value_bytes=65536, share=0.5),
    VolumeWish(name="k", value_bytes=65536, share=0.5, layout="kv"),
]
ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")


async def until(condition: Callable[[], object], what: str) -> None:
    with trio.move_on_after(60):
        while not condition():  # noqa: ASYNC110 - polled: the enclosure knows no trio
            await trio.sleep(0.01)
        return
    raise AssertionError(f"not within 60 s: {what}")


async def on_thread(work: Callable[[Fabric], None], fabric: Fabric) -> None:
    """Not one of trio's, which stay for a while."""
    thread = threading.Thread(target=work, args=(fabric,))
    thread.start()
    await until(lambda: not thread.is_alive(), work.__name__)


def lay_out(fabric: Fabric) -> None:
    """A pool on a namespace of blocks, which has number 0, and on one of keys."""
    blocks, keys = fabric.nguids
    pool_map = plan_pool([(blocks, 16 << 20)], WISHES, ROOT, [(keys, 16 << 20)])
    channel = WorkerChannel(fabric, 1)
    channel.connect_ahead(20.0)
    try:
        channel.run(write_superblock(channel, 0, blocks, pool_map))
        channel.run(write_superblock(channel, 1, keys, pool_map, KEY_PLACES))
    finally:
        channel.close()


def prove(fabric: Fabric) -> None:
    channel = WorkerChannel(fabric, 1)
    channel.connect_ahead(20.0)
    try:
        PathProber(fabric).turn(channel)
    finally:
        channel.close()


@pytest.mark.expects_log("and is another: left out", "not connected, and tried again", "while own is away")
def test_a_second_port_becomes_a_path_and_a_copy_of_the_same_name_does_not(tmp_path: Path) -> None:
    """Discovery lists both. Whatever becomes of the original, nothing is asked of the copy."""

    async def main() -> None:
        with Enclosure(EnclosureSettings(name="own", folder=tmp_path / "own", ports=2, **DRIVES)) as own:
            shutil.copytree(tmp_path / "own", tmp_path / "copy", ignore=shutil.ignore_patterns("*.lock"))
            nqn = own.settings.subsystem_nqn
            named = EnclosureSection(name="own", address="127.0.0.1", port=own.ports[0], nqn=nqn)
            with Enclosure(EnclosureSettings(name="own", folder=tmp_path / "copy", **DRIVES)) as copy:
                assert [each.nguid for each in copy.drives] == [each.nguid for each in own.drives]
                own.target.add_port(DiscoveryEntry("127.0.0.1", str(copy.port), subsystem_nqn=nqn))
                await follow(named, DiscoverySection(name="pod", address="127.0.0.1", port=own.port), own)
                assert [drive.stats().get("write_commands", 0) for drive in copy.drives] == [0, 0]
                assert copy.drives[1].stats()["used_bytes"] == 0

    async def follow(named: EnclosureSection, discovery: DiscoverySection, own: Enclosure) -> None:
        supervisor = Supervisor([named], HOST, HOST_ID, 2, discovery=[discovery])
        fabric = supervisor.fabric
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            await until(lambda: len(connected(fabric)) == 3, "three sessions")
            fabric.adopt([drive.nguid for drive in own.drives])
            assert [len(ways) for ways in fabric.ways] == [1, 1]
            await on_thread(lay_out, fabric)
            assert len(fabric.unproven()) == 4
            await on_thread(prove, fabric)
            assert fabric.unproven() == ()
            assert [len(ways) for ways in fabric.ways] == [2, 2]
            assert len(fabric.contested) == 2
            own.set_port_up(1, False)
            await until(lambda: len(connected(fabric)) == 2, "the first port is gone")
            assert [[way.enclosure.discovered for way in ways] for ways in fabric.ways] == [[True], [True]]
            own.set_port_up(2, False)
            await until(lambda: len(connected(fabric)) == 1, "the second port is gone")
            assert fabric.routes == (None, None)
            nursery.cancel_scope.cancel()

    trio.run(main)


def connected(fabric: Fabric) -> list[str]:
    return [each.name for each in fabric.enclosures if each.session is not None]
