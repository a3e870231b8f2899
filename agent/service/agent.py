"""The agent: sessions, pool, faces and door, joined and taken down in order.

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agent.attach.map_history import MapHistory, opens
from agent.attach.map_watch import MapWatch
from agent.attach.open_volumes import open_volumes
from agent.config.configuration import Configuration
from agent.fs.control.face import CONTROL_ROOT, ControlFace
from agent.fs.control.registered_memory import RegisteredMemory
from agent.fs.doors.dev_fuse import DevFuseDoor
from agent.fs.doors.door import Door
from agent.fs.files.face import FilesFace
from agent.fs.files.home import NamesElsewhere
from agent.fs.files.options import FilesOptions
from agent.fs.files.pool_store import store_for
from agent.fs.interface import FACE_FILES, FACE_SHIFT, FileSystem
from agent.fs.kv_face import KV_ROOT, KvFace
from agent.fs.root import RootFileSystem
from agent.fs.virtiofs.door import VirtioFsDoor
from agent.host_os.bounds import Bounds
from agent.host_os.duties import Duties
from agent.inline.root_keys import RootKey
from agent.membership.rebalance_status import RebalanceStatus
from agent.pool.map.document import PoolMap
from agent.pool.map.seal import MapSeal
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.volume import Volume
from agent.remote.channel import current_lanes
from agent.remote.channel_pool import ChannelPool
from agent.remote.fabric import Fabric
from agent.remote.path_prober import PathProberThread
from agent.s3.door import S3Door
from agent.service.queue_plan import QueuePlan
from agent.service.repair import Repair
from agent.service.volume_policies import VolumePolicies
from agent.service.watched_memory import watch_blocks, watch_memory
from agent.telemetry import snapshot
from agent.tenancy.limits import TenantLimits
from agent.tenancy.visibility import Audience, Members

Doors = list[tuple[str, Door]]
"""By their names: `fuse`, `virtiofs-0` and so on, and `s3`."""
MOUNT_DOOR = "fuse"
S3_DOOR = "s3"

log = logging.getLogger(__name__)

UPKEEP_SECONDS = 0.5


class Agent:
    """The pool, open: volumes, faces, and the threads beside the door's. Made once the map is known."""

    def __init__(
        self,
        configuration: Configuration,
        pool_map: PoolMap,
        root: RootKey,
        seal: MapSeal,
        fabric: Fabric,
        lanes: ChannelPool,
        queues: QueuePlan,
    ) -> None:
        self.configuration = configuration
        self.queues = queues
        settings = configuration.agent
        self.lanes = lanes
        self.bounds = Bounds({0, os.geteuid()})
        self.directories = DirectoryCache(settings.directory_cache)
        self.seen, self._seal = MapHistory(settings.state), seal
        self.seen.refuse(pool_map)
        pool_map = self.seen.believed(pool_map)
        self.volumes = open_volumes(pool_map, root, configuration, self.directories)
        self._note(pool_map, is_on_most=False)
        self.members = Members.of(pool_map)
        self.serving = VolumePolicies(configuration, self.volumes, self.lanes.take, queues)
        self.served = self.serving.served
        self.prestage, self.continuer = self.serving.prestage, self.serving.continuer
        self.start_prestage = self.serving.start_prestage
        self.registered = RegisteredMemory(settings.registered_memory)
        self.tenants = TenantLimits(pool_map, self.volumes, settings.workers, root, settings.state)
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
        self.membership = RebalanceStatus(
            configuration.pool,
            self.volumes,
            fabric,
            root,
            lambda: self.watch.pool_map,
            seal,
            lambda: self.watch.without_map,
        )
        self.files: FilesFace | None = None
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
        self.keeping = Repair(
            configuration.scrub,
            self.volumes,
            lambda: lanes.take(queues.repair),
            lanes.tallies,
            self._has_files,
        )
        self.sources.keeping = self.keeping.snapshot
        self.sources.membership = self.membership.snapshot
        self.sources.s3 = self._s3_snapshot
        self.sources.bounds = self.bounds.snapshot
        watch_memory(
            self.bounds,
            self.served,
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
        self._proving: PathProberThread | None = None
        prober = queues.path_prober
        if prober is not None:
            self._proving = PathProberThread(fabric, lambda: lanes.take(prober))

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
        key_value = audience.key_value(self.served)
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
                workers=len(self.queues.workers) + sum(map(len, self.queues.guests)),
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
            if self.files is not None and audience.shows_files(self.served):
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
        lanes, files = self.lanes.take(self.queues.upkeep), self.files

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
        if self.queues.members is not None:
            self.membership.start(self.queues.members)
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
