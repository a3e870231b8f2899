"""The agent: sessions, pool, faces and door, joined and taken down in order.

`serve` is the program. It brings up, in this order, the sessions to the enclosures, the pool map and the
volumes, the faces, the door; and takes them down in the opposite one. Nothing that matters is kept in
memory, so there is no shutdown that must not be interrupted.

Who runs where: the supervisor is trio's, on the main thread; each worker of the door is a thread with
lanes of its own; prestaging and upkeep have a thread or two, with lanes of their own. Queue ids tell
them apart on the enclosures: 1 to `workers` are the door's, those after it the others'. An enclosure takes
one Connect for an id, so whatever needs lanes either has a thread that keeps them or takes over those of a
thread that has ended.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

import trio

from agent.attach.connect import LanesPool, connected, look_round, say_what_is_away, unreached
from agent.attach.map_history import SeenMaps, map_seal, opens
from agent.attach.map_watch import MapWatch
from agent.attach.open_volumes import open_volumes
from agent.bounds import Bounds
from agent.config.configuration import Configuration
from agent.errors import G35Error
from agent.fs.control.face import CONTROL_ROOT, ControlFace
from agent.fs.control.registered_memory import RegisteredMemory
from agent.fs.doors.dev_fuse import DevFuseDoor
from agent.fs.doors.door import Door, make_door
from agent.fs.doors.mounting import MountError, MountOptions, clear_dead_mount, refuse_to_cover
from agent.fs.files.face import FilesFace
from agent.fs.files.home import NamesElsewhere
from agent.fs.files.options import FilesOptions
from agent.fs.files.pool_store import store_for
from agent.fs.interface import FACE_FILES, FACE_SHIFT, FileSystem
from agent.fs.kv_face import KV_ROOT, KvFace
from agent.fs.root import RootFileSystem
from agent.fs.virtiofs.door import VirtioFsDoor
from agent.host_os.cpu_idle import keep_awake
from agent.host_os.duties import Duties
from agent.host_os.presence import set_mark
from agent.inline.root_keys import RootKey, root_key_in
from agent.membership.rebalance_status import Membership
from agent.pool.map.document import PoolMap
from agent.pool.map.inspect import newest_map
from agent.pool.map.seal import MapSeal
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.volume import Volume
from agent.remote.channel import WorkerLanes, current_lanes
from agent.remote.fabric import Fabric
from agent.remote.path_prober import ProvingThread
from agent.s3.door import S3Door
from agent.s3.opening import make_s3_door
from agent.service.guest_doors import make_guest_doors
from agent.service.queue_plan import (
    EXTRA_QUEUES,
    UPKEEP_AFTER,
    granted_workers,
    guest_queues,
    own_queues,
    s3_queues,
)
from agent.service.repair import Keeping
from agent.service.volume_policies import Serving
from agent.service.watched_memory import watch_blocks, watch_memory
from agent.telemetry import metrics, snapshot
from agent.tenancy.limits import TenantUpkeep
from agent.tenancy.visibility import Audience, Members

log = logging.getLogger(__name__)

UPKEEP_SECONDS = 0.5
LOOK_SECONDS = 0.25
"""How soon an unmount by somebody else is noticed."""


Doors = list[tuple[str, Door]]
"""By their names: `fuse`, `virtiofs-0` and so on, and `s3`."""
MOUNT_DOOR = "fuse"
S3_DOOR = "s3"


class Agent:
    """The pool, open: volumes, faces, and the threads beside the door's. Made once the map is known."""

    def __init__(
        self,
        configuration: Configuration,
        pool_map: PoolMap,
        root: RootKey,
        seal: MapSeal,
        fabric: Fabric,
        lanes: LanesPool,
    ) -> None:
        self.configuration = configuration
        settings = configuration.agent
        self.lanes = lanes
        self.bounds = Bounds({0, os.geteuid()})
        self.directories = DirectoryCache(settings.directory_cache)
        self.seen, self._seal = SeenMaps(settings.state), seal
        self.seen.refuse(pool_map)
        pool_map = self.seen.believed(pool_map)
        self.volumes = open_volumes(pool_map, root, configuration, self.directories)
        self._note(pool_map, is_on_most=False)
        self.members = Members.of(pool_map)
        storing_queue = settings.workers + EXTRA_QUEUES + 1
        self.serving = Serving(configuration, self.volumes, self.lanes.take, storing_queue)
        self.prestage, self.continuer = self.serving.prestage, self.serving.continuer
        self.start_prestage = self.serving.start_prestage
        self.registered = RegisteredMemory(settings.registered_memory)
        self.tenants = TenantUpkeep(pool_map, self.volumes, settings.workers, root, settings.state)
        self.tenants.rotation.unnamed = self._unnamed
        distrust = functools.partial(self.seen.distrusted, self.volumes, root)
        self.watch = MapWatch(
            pool_map,
            self.volumes,
            self.prestage,
            self._follow_map,
            fabric.grow,
            distrust,
            fabric.note_taken,
            functools.partial(self._note, is_on_most=True),
            functools.partial(opens, root),
            seal,
        )
        self.membership = Membership(
            configuration.pool,
            self.volumes,
            fabric,
            root,
            lambda: self.watch.pool_map,
            seal,
            lambda: self.watch.without_map,
        )
        self.files: FilesFace | None = None
        self._upkeep_queue = settings.workers + UPKEEP_AFTER
        self.sources = snapshot.Sources(
            pool_map.pool_id,
            pool_map.version,
            str(settings.mount or ""),
            settings.door if settings.mount is not None else "virtiofs",
            self.volumes,
            fabric,
            self.directories,
            self.prestage,
            self.lanes.tallies,
            self._files_snapshot,
            self._doors_snapshot,
        )
        self.sources.tenants, self.sources.keys = self.tenants.snapshot, self.tenants.rotation.snapshot
        self.sources.registered = self.registered.mapped_bytes
        keeper_queue = self._upkeep_queue + 1
        self.keeping = Keeping(
            configuration.scrub,
            self.volumes,
            lambda: lanes.take(keeper_queue),
            lanes.tallies,
            self._has_files,
        )
        self.sources.keeping = self.keeping.snapshot
        self.sources.membership = self.membership.snapshot
        self.sources.s3 = self._s3_snapshot
        self.sources.bounds = self.bounds.snapshot
        watch_memory(
            self.bounds,
            self.volumes,
            self.directories,
            self.prestage,
            self.serving.prestager,
            self.continuer,
            self.registered,
            settings.registered_memory,
            fabric.fence,
        )
        self.doors: Doors = []
        self._stopping = threading.Event()
        self._upkeep: threading.Thread | None = None
        self._proving: ProvingThread | None = None
        if configuration.discovery:
            proving_queue = (
                settings.workers + own_queues(configuration) - (configuration.pool.membership == "auto")
            )
            self._proving = ProvingThread(fabric, lambda: lanes.take(proving_queue))

    def snapshot(self) -> dict[str, Any]:
        return snapshot.take(self.sources)

    def _follow_map(self, newer: PoolMap) -> None:
        self.sources.map_version = newer.version
        self.tenants.follow(newer)
        # After that: the disk of the state folder may be full, or hang.
        self._note(newer, is_on_most=False)

    def _note(self, pool_map: PoolMap, *, is_on_most: bool) -> None:
        has_seal = pool_map.pool_id in self._seal.pools
        self.seen.note(pool_map, self._served(), is_on_most=is_on_most, has_seal=has_seal)

    def _served(self) -> list[str]:
        return [each.settings.volume_id.hex() for each in self.volumes if not each.erased]

    def _files_snapshot(self) -> dict[str, Any] | None:
        if self.files is None:
            return None
        return {**asdict(self.files.counters), **asdict(self.files.gauges())}

    def _s3_door(self) -> S3Door | None:
        return next((door for _, door in self.doors if isinstance(door, S3Door)), None)

    def _s3_snapshot(self) -> Mapping[str, Any] | None:
        door = self._s3_door()
        return None if door is None else door.snapshot()

    def _has_files(self, volume: Volume) -> bool:
        """Whether a volume of blocks is in use here, by /fs or S3: one agent of a pool uses it."""
        door = self._s3_door()
        if door is not None and door.holds_anything(volume.settings.tenant):
            return True
        return self.files is not None and self.files.gauges().is_anything

    def _unnamed(self, blocks: Sequence[bytes]) -> Sequence[bytes]:
        """Of some identifiers of blocks those that no file of this agent has, in /fs or by S3."""
        if self.sources.not_served:
            return ()  # names that are not open cannot be asked
        if self.files is not None and blocks:
            blocks = self.files.orphans(blocks)
        door = self._s3_door()
        return blocks if door is None or not blocks else door.orphans(blocks)

    def _doors_snapshot(self) -> dict[str, dict[str, int]]:
        counts = {}
        for name, door in self.doors:
            if isinstance(door, DevFuseDoor):
                moved = door.session.traffic()
                copied = moved.bytes_read + moved.bytes_written  # by the kernel, between its pages and ours
            elif isinstance(door, VirtioFsDoor):
                moved = door.device.session.traffic()
                copied = door.device.bytes_copied
            else:
                continue
            counts[name] = {**asdict(moved), "bytes_copied": copied}
        return counts

    def file_system(self) -> RootFileSystem:
        """The tree of the mount. It belongs to whoever runs the agent."""
        owner = (os.geteuid(), os.getegid())
        audience = Audience("agent", self.configuration.agent.tenants)
        audience.check(self.members)
        key_value = audience.key_value(self.volumes)
        blocks = [each for each in self.volumes if isinstance(each, Volume) and each.settings.kind == "files"]
        faces: dict[bytes, tuple[int, FileSystem]] = {
            b"kv": (
                KV_ROOT,
                KvFace(key_value, current_lanes, self.prestage, owner, 0, self.continuer, bounds=self.bounds),
            ),
        }
        if blocks:
            options = FilesOptions(
                staging_bytes=self.configuration.files.staging,
                on_full=self.configuration.files.on_full,
                workers=self.configuration.agent.workers + guest_queues(self.configuration),
                root_uid=owner[0],
                root_gid=owner[1],
            )
            metadata = self.configuration.agent.state / "files.sqlite"
            store, home = store_for(metadata, self.sources.pool_id, blocks, current_lanes)
            try:
                self.files = FilesFace(metadata, store, options, home=home, bounds=self.bounds)
                watch_blocks(self.bounds, store)
            except NamesElsewhere as elsewhere:
                log.error("/fs is not served: %s", elsewhere)
                self.sources.not_served["/fs"] = f"{elsewhere}; {elsewhere.advice}"
            if self.files is not None and audience.shows_files(self.volumes):
                faces[b"fs"] = (FACE_FILES << FACE_SHIFT | 1, self.files)
        sources = audience.sources(self.sources, key_value)
        faces[b".g35"] = (
            CONTROL_ROOT,
            ControlFace(
                key_value,
                current_lanes,
                lambda: snapshot.take(sources),
                self.start_prestage,
                self.prestage,
                owner,
                self.continuer,
                self.registered,
                self.bounds,
            ),
        )
        return RootFileSystem(faces, owner)

    def _keep_up(self) -> None:
        """Look at the pool map, and delete the blocks that files have given up, a batch at a time; at the
        end seal what is staged.

        One thread does it all, for its lanes are the only ones of their queue id.
        """
        lanes, files = self.lanes.take(self._upkeep_queue), self.files

        def delete_given_up() -> None:
            while files is not None and lanes.run(files.collect()) and not self._stopping.is_set():
                lanes.run(self.watch.look(lanes))

        duties = Duties(
            {
                "following the pool map": lambda: lanes.run(self.watch.look(lanes)),
                "noting the pool map": lambda: self.seen.write_again(lanes.now()),
                "upkeep of tenants": lambda: lanes.run(self.tenants.look(lanes)),
                "moving values to newcomers": lambda: lanes.run(self.membership.turn(lanes)),
                "looking into damage": lambda: lanes.run(self.keeping.look(lanes)),
                "deleting what files have given up": delete_given_up,
            }
        )
        self.sources.upkeep_failures = lambda: sum(duties.failed.values())
        while not self._stopping.wait(UPKEEP_SECONDS):
            duties.turn()
        if files is None:
            return
        try:
            failures = lanes.run(files.seal_everything())
            if failures:
                log.warning("%d files could not be sealed", failures)
        except Exception:
            log.exception("sealing what is staged failed")

    def start(self) -> None:
        self.serving.start()
        self.keeping.start()
        self.membership.start(self.configuration.agent.workers + own_queues(self.configuration))
        self._upkeep = threading.Thread(target=self._keep_up, name="upkeep", daemon=True)
        self._upkeep.start()
        if self._proving is not None:
            self._proving.start()

    def stop(self) -> None:
        """After the door: end the threads, and with the upkeep's seal what open files have staged.

        Sealing takes as long as it takes: what is staged is somebody's file.
        """
        self.registered.close()
        self._stopping.set()
        self.serving.stop()
        self.keeping.stop()
        self.membership.stop()
        if self._proving is not None:
            self._proving.stop()
        if self._upkeep is not None:
            self._upkeep.join()
        self.tenants.rotation.close()
        if self.files is not None:
            self.files.close()


async def serve(configuration: Configuration, ready: Callable[[], None], stop: trio.Event) -> None:
    """Serve the mount until `stop` is set or somebody unmounts it; `ready` is called once it is up."""
    root = root_key_in(configuration.agent.key_file)
    wanted = configuration.agent.worker_count
    extra = own_queues(configuration) + guest_queues(configuration) + s3_queues(configuration)
    async with (
        connected(configuration, wanted + extra) as supervisor,
        AsyncExitStack() as cleanup,
    ):
        fabric = supervisor.fabric
        workers = granted_workers(fabric, wanted, extra)
        supervisor.queues_in_use = workers + extra
        settings = configuration.agent.model_copy(update={"workers": workers})
        configuration = configuration.model_copy(update={"agent": settings})
        lanes = LanesPool(fabric)
        cleanup.callback(lanes.close)
        seal = map_seal(root, settings.state)
        pool_map, others = await trio.to_thread.run_sync(_find_pool, fabric, lanes.take(1), seal)
        cleanup.callback(set_mark(pool_map.pool_id).close)
        fabric.adopt([bytes.fromhex(namespace.nguid) for namespace in pool_map.namespaces])
        say_what_is_away(fabric)
        agent = Agent(configuration, pool_map, root, seal, fabric, lanes)
        for number, pool_id in others.items():
            agent.watch.note_taken(number, pool_id)
        if settings.metrics:
            cleanup.callback(metrics.serve(settings.metrics, agent.snapshot, agent.bounds))
        agent.doors = await trio.to_thread.run_sync(_make_doors, agent, wanted)
        agent.start()
        cleanup.push_async_callback(_on_thread, agent.stop)
        for _, door in agent.doors:
            try:
                await trio.to_thread.run_sync(door.start)
            except MountError as error:
                raise G35Error(f"cannot mount at {settings.mount}: {error}", "see g35 doctor") from None
            cleanup.push_async_callback(_on_thread, door.stop)
        ready()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_awake, settings.stay_awake, lanes.work_done)
            await _until_over(agent.doors, stop)
            nursery.cancel_scope.cancel()


def _make_doors(agent: Agent, wanted_workers: int) -> Doors:
    """Every door of the configuration, none of them open yet. `wanted_workers`: as configured."""
    settings, lanes = agent.configuration.agent, agent.lanes
    tree = agent.file_system()
    doors: Doors = []
    if settings.mount is not None:
        clear_dead_mount(settings.mount)
        settings.mount.mkdir(parents=True, exist_ok=True)
        refuse_to_cover(settings.mount)
        door = make_door(
            "dev_fuse" if settings.door == "fuse" else "pyfuse3",
            tree,
            settings.mount,
            settings.workers,
            lambda number: lanes.take(number + 1),
            MountOptions(allow_other=settings.allow_other or None),
        )
        doors.append((MOUNT_DOOR, door))
    first = settings.workers + own_queues(agent.configuration) + 1
    guests = make_guest_doors(
        agent, agent.configuration.virtiofs, wanted_workers, first, lanes.take, settings.state
    )
    doors += [(f"virtiofs-{number}", door) for number, door in enumerate(guests)]
    s3 = agent.configuration.s3
    if s3.listen:
        first += guest_queues(agent.configuration)
        options = FilesOptions(s3.staging, on_full=agent.configuration.files.on_full, workers=s3.workers)
        erased = {each.name for each in agent.watch.pool_map.tenants if each.is_erased}
        made = make_s3_door(
            s3,
            agent.volumes,
            settings.state,
            options,
            current_lanes,
            lambda number: lanes.take(first + number),
            erased,
            agent.sources.pool_id,
            agent.sources.not_served,
            agent.bounds,
        )
        doors.append((S3_DOOR, made))
    return doors


async def _on_thread(end: Callable[[], None]) -> None:
    """Run an end on a thread, to its end: the sessions must be kept alive for as long as it takes."""
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(end)


def _find_pool(fabric: Fabric, lanes: WorkerLanes, seal: MapSeal) -> tuple[PoolMap, dict[int, str]]:
    """The map in force, and the namespaces of it, by their numbers there, that carry another pool."""
    seen = look_round(fabric, lanes)
    if not seen:
        raise G35Error(
            f"no enclosure shows a namespace; not connected: {unreached(fabric)}",
            "check addresses, ports and NQNs, and that the enclosures allow this host",
        )
    pool_map = newest_map([inspection for _, _, inspection in seen], seal)
    carried = {nguid.hex(): each.superblock.pool_map.pool_id for nguid, _, each in seen if each.superblock}
    others = {number: carried.get(each.nguid, "") for number, each in enumerate(pool_map.namespaces)}
    return pool_map, {
        number: other for number, other in others.items() if other not in ("", pool_map.pool_id)
    }


async def _until_over(doors: Doors, stop: trio.Event) -> None:
    """Until `stop`, an unmount, or the end of the last door. A guest's device that ends, which none should,
    is that guest's loss: the mount and the other guests go on."""
    served = dict(doors)
    while not stop.is_set():
        for name, door in list(served.items()):
            if await trio.to_thread.run_sync(door.wait, 0.0):
                del served[name]
                if name == MOUNT_DOOR or not served:
                    log.info(
                        "the door %s is served no longer: somebody has unmounted the pool, or see above", name
                    )
                    return
                log.error(
                    "the door %s is served no longer; the others are. Restart the agent to have it back", name
                )
        with trio.move_on_after(LOOK_SECONDS):
            await stop.wait()
