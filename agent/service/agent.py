"""The agent: a pool that is open, the parts that serve it, and their services in the order of their start.

Each thread that talks to enclosures has a channel with a queue id of its own (queue_plan.py): an enclosure
takes one Connect for an id. So a user of a channel has a thread that keeps it, or takes over the channel of a
thread that has ended.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from agent.attach.map_history import MapHistory
from agent.attach.map_watch import MapWatch
from agent.attach.open_volumes import open_volumes
from agent.config.configuration import Configuration
from agent.fs.after_reply import after_reply_of
from agent.fs.control.registered_memory import RegisteredMemory
from agent.fs.doors.dev_fuse import DevFuseDoor
from agent.fs.files.face import FilesFace
from agent.fs.files.metadata_pool import NamesElsewhere
from agent.fs.files.options import FilesOptions
from agent.fs.files.pool_store import store_for
from agent.fs.shared.discards import Discards
from agent.fs.shared.recent_names import NamesSeen
from agent.fs.shared.unnamed import UnnamedChunks
from agent.host_os.per_user_bounds import Bounds
from agent.http.counters import summed
from agent.inline.secrets import RootKey
from agent.membership.auto_join import AutoJoin, membership_status
from agent.pool.counters import Tally
from agent.pool.maintenance.count_uses import count_uses
from agent.pool.maintenance.rebalance import Rebalancer
from agent.pool.map.document import PoolMap
from agent.pool.map.map_seal import MapSeal
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.set_versions import SetVersions, shared_versions
from agent.pool.volume.volume import Volume, in_sets
from agent.remote.channel import WorkerChannel, current_channel
from agent.remote.channel_pool import ChannelPool
from agent.remote.fabric import Fabric
from agent.remote.path_prober import PathProberThread
from agent.service.doors import GUEST_DOORS, QUERY_DOOR, S3_DOOR, Doors, Shown, make_doors
from agent.service.queue_plan import QueuePlan
from agent.service.readers import Readers
from agent.service.repair import Repair
from agent.service.slot_lender import FabricFence, SlotLender, links_of
from agent.service.upkeep import Upkeep
from agent.service.volume_policies import VolumePolicies
from agent.service.watched_memory import watch_blocks, watch_memory
from agent.service.why_alone import alone_though_asked, why_alone
from agent.service.worker_channels import with_short_waits
from agent.spill.tier import SpillTier
from agent.telemetry import snapshot
from agent.tenancy.limits import TenantLimits
from agent.tenancy.visibility import Members

if TYPE_CHECKING:
    from agent.fs.virtiofs.door import VirtioFsDoor
    from agent.query.door import QueryDoor
    from agent.s3.door import S3Door

log = logging.getLogger(__name__)

PROCESSES: Final = "processes"
"""The one part in `not_served` that holds no names of files: it says that the agent is one process."""


def nothing() -> None:
    """For a service that has no start, no stop or no status."""


class Service(NamedTuple):
    """`start` and `stop` are called once each, on a thread that may block. Services stop in reverse order.

    Any thread may ask for `status`: what `g35 status` tells of it; None, where that is nothing.
    """

    start: Callable[[], None] = nothing
    stop: Callable[[], None] = nothing
    status: Callable[[], Any] = nothing


class Agent:
    """Whole when it is made, and nothing of it has started then. Its services start it."""

    def __init__(
        self,
        configuration: Configuration,
        pool_map: PoolMap,
        root: RootKey,
        seal: MapSeal,
        fabric: Fabric,
        channels: ChannelPool,
        queues: QueuePlan,
        taken: Mapping[int, str],
    ) -> None:
        """To be made on a thread that may block. `taken`: namespaces that carry another pool, by number.
        Raises G35Error."""
        self.configuration, self.queues, self.channels = configuration, queues, channels
        settings = configuration.agent
        self.bounds = Bounds({0, os.geteuid()})
        self.not_served: dict[str, str] = {}
        """The parts of the configuration that are not served, and why."""
        self.readers, versions = self._make_readers()
        parts = settings.process_count if self.readers is not None else 1
        self.directories = DirectoryCache(settings.directory_cache // parts, versions)
        self._history = MapHistory(settings.state)
        self._history.refuse(pool_map)
        pool_map = self._history.believed(pool_map)
        self.pool_id = pool_map.pool_id

        def say_map_version(newer: PoolMap) -> None:
            if versions is not None:
                versions.say_map_version(newer.version)

        say_map_version(pool_map)
        self.volumes = open_volumes(pool_map, root, configuration, self.directories)
        erased = {each.name for each in pool_map.tenants if each.is_erased}
        self.members = Members.of(pool_map)
        self.policies = VolumePolicies(configuration, self.volumes, channels.take, queues)
        self.served = self.policies.served
        self.lender = SlotLender(
            self.served,
            with_short_waits(channels.take, settings.timing.read_deadline),
            queues.slots,
            links_of(configuration),
            FabricFence(fabric),
            on_one_processor=settings.lends_single_slots,
        )
        if self.readers is not None:
            self.readers.lend_by(self.lender)
            self.readers.serve_volumes(self.volumes)
        self.registered = RegisteredMemory(settings.registered_memory)
        self.discards, self.names_seen = Discards(self.bounds), NamesSeen(self.bounds)
        self.unnamed = UnnamedChunks()
        self.tenants = TenantLimits(
            pool_map, self.volumes, settings.workers, root, settings.state, self._unnamed
        )
        self.watch = MapWatch(
            pool_map,
            self.volumes,
            self.policies.prestage,
            self._history,
            root,
            fabric,
            seal,
            self.tenants.follow,
            say_map_version,
        )
        for number, pool_id in taken.items():
            self.watch.note_taken(number, pool_id)
        self.rebalancer = Rebalancer(self.volumes, configuration.pool.rebalance)
        self.auto_join: AutoJoin | None = None
        if queues.members is not None:
            self.auto_join = AutoJoin(
                configuration.pool,
                fabric,
                root,
                lambda: self.watch.pool_map,
                lambda: self.rebalancer.moves.left,
                seal,
                queues.members,
            )
        self.repair = Repair(
            configuration.scrub,
            self.volumes,
            lambda: channels.take(queues.repair),
            channels.tallies,
            self._has_files,
        )
        self.spill = SpillTier(
            configuration.spill,
            self.pool_id,
            self.volumes,
            {each.settings.name: each.gate for each in self.served if each.gate is not None},
            [functools.partial(channels.take, queue) for queue in queues.spill],
        )
        self.after_reply = after_reply_of(len(queues.workers), self.bounds)
        self.files = self._open_files()
        self.services: dict[str, Service] = {}
        self.sources = snapshot.Sources(
            pool_id=self.pool_id,
            map_version=lambda: self.watch.pool_map.version,
            mount=str(settings.mount or ""),
            door=settings.door if settings.mount is not None else "virtiofs",
            volumes=self.volumes,
            fabric=fabric,
            directories=self.directories,
            prestage=self.policies.prestage,
            tallies=self._tallies,
            files=self._files_status,
            doors=self._traffic,
            tenants=self.tenants.snapshot,
            keys=self.tenants.rotation.snapshot,
            membership=functools.partial(
                membership_status, configuration.pool, self.volumes, fabric, self.watch, self.rebalancer,
                self.auto_join,
            ),
            gates=self.policies.gates,
            service=self._status_of,
            bounds=self.bounds.snapshot,
            not_served=self.not_served,
        )  # fmt: skip
        watch_memory(
            self.bounds, self.policies, self.directories, self.registered, settings.registered_memory,
            fabric.fence,
        )  # fmt: skip
        shown = Shown(
            self.served, self.members, self.files, self.sources, self.bounds, self.policies.prestage,
            self.policies.readahead, self.policies.start_prestage, self.discards, self.names_seen,
            self.unnamed, self.after_reply, self.registered,
            0 if self.readers is None else settings.process_count - 1,
        )  # fmt: skip
        self.doors: Doors = {}
        self.doors |= make_doors(configuration, queues, channels.take, shown, self.volumes, erased)
        self.services |= self._services(fabric)

    def _make_readers(self) -> tuple[Readers | None, SetVersions | None]:
        """The other processes of this agent, where it has some, and what they are told by."""
        settings = self.configuration.agent
        if settings.process_count == 1:
            return None, None
        if said := alone_though_asked(self.configuration):
            log.warning("%s", said)
            self.not_served[PROCESSES] = said
        if said or why_alone(self.configuration):
            return None, None
        descriptor = shared_versions()
        return Readers(self.configuration, descriptor), SetVersions(descriptor, is_writer=True)

    def _tallies(self) -> Iterator[Mapping[str, Tally]]:
        yield from self.channels.tallies()
        if self.readers is not None:
            yield from self.readers.tallies()

    def _open_files(self) -> FilesFace | None:
        """/fs, where the pool has a volume for it and its names are those of this pool."""
        blocks = [each for each in in_sets(self.volumes) if each.settings.kind == "files"]
        if not blocks:
            return None
        options = FilesOptions(
            staging_bytes=self.configuration.files.staging,
            on_full=self.configuration.files.on_full,
            workers=len(self.queues.workers) + sum(map(len, self.queues.guests)),
            root_uid=os.geteuid(),
            root_gid=os.getegid(),
        )
        metadata = self.configuration.agent.state / "files.sqlite"
        store, home = store_for(metadata, self.pool_id, blocks, current_channel)
        try:
            files = FilesFace(
                metadata, store, options, home=home, bounds=self.bounds, after_reply=self.after_reply
            )
        except NamesElsewhere as elsewhere:
            log.error("/fs is not served: %s", elsewhere)
            self.not_served["/fs"] = f"{elsewhere}; {elsewhere.advice}"
            return None
        watch_blocks(self.bounds, store)
        return files

    def _services(self, fabric: Fabric) -> dict[str, Service]:
        """All of them, in the order in which they start."""
        upkeep = Upkeep(lambda: self.channels.take(self.queues.upkeep), self._duties, self.files)
        services = {"keys": Service(stop=self.tenants.rotation.close)}
        if self.files is not None:
            services["files"] = Service(stop=self.files.close)
        if address := self.configuration.agent.metrics:
            from agent.telemetry import metrics  # with prometheus_client and h11, for who has them read

            listener = metrics.listener_at(address, self.snapshot, self.bounds)
            services["metrics"] = Service(listener.start, listener.stop)
        services["upkeep"] = Service(upkeep.start, upkeep.stop, upkeep.failures)
        if (queue := self.queues.path_prober) is not None:
            prober = PathProberThread(fabric, lambda: self.channels.take(queue))
            services["prober"] = Service(prober.start, prober.stop)
        if self.auto_join is not None:
            services["members"] = Service(self.auto_join.start, self.auto_join.stop)
        services["keeper"] = Service(self.repair.start, self.repair.stop, self.repair.snapshot)
        services["spill"] = Service(self.spill.start, self.spill.stop, self.spill.snapshot)
        services["policies"] = Service(self.policies.start, self.policies.stop)
        services["memory"] = Service(stop=self.registered.close, status=self.registered.mapped_bytes)
        for name, door in self.doors.items():
            # By its name: to name its class would load the doors of HTTP for an agent that has none.
            speaks_http = name in (S3_DOOR, QUERY_DOOR)
            status = cast("S3Door | QueryDoor", door).snapshot if speaks_http else nothing
            services[name] = Service(door.start, door.stop, status)
        if self.readers is not None:
            if (s3 := self._s3_door()) is not None:
                self.readers.serve_s3_with(s3)
                services[S3_DOOR] = services[S3_DOOR]._replace(status=self._s3_status)
            self.readers.serve_guests_with(
                [
                    cast("VirtioFsDoor", door)
                    for name, door in self.doors.items()
                    if name.startswith(GUEST_DOORS)
                ]
            )
            services["slots"] = Service(self.lender.start, self.lender.stop)
            services["readers"] = Service(self.readers.start, self.readers.stop, self.readers.status)
        return services

    def _duties(self, channel: WorkerChannel, stopping: threading.Event) -> Mapping[str, Callable[[], None]]:
        """Of the upkeep thread, in their order."""
        files = self.files

        def delete_given_up() -> None:
            while files is not None and channel.run(files.collect()) and not stopping.is_set():
                channel.run(self.watch.look(channel))

        def delete_replaced() -> None:
            while channel.run(self.discards.collect(channel)) and not stopping.is_set():
                channel.run(self.watch.look(channel))

        def count_uses_elsewhere() -> None:
            if self.readers is not None and (uses := self.readers.take_uses()):
                channel.run(count_uses(in_sets(self.volumes), channel, uses))

        return {
            "following the pool map": lambda: channel.run(self.watch.look(channel)),
            "noting the pool map": lambda: self._history.write_again(channel.now()),
            "upkeep of tenants": lambda: channel.run(self.tenants.look(channel)),
            "moving values to newcomers": lambda: channel.run(self.rebalancer.turn(channel)),
            "counting uses of other processes": count_uses_elsewhere,
            "looking into damage": lambda: channel.run(self.repair.look(channel)),
            "deleting what files have given up": delete_given_up,
            "naming chunks of files that wait": lambda: channel.run(self.unnamed.name(channel)),
            "deleting chunks that no file has any more": delete_replaced,
        }

    def snapshot(self) -> dict[str, Any]:
        return snapshot.take(self.sources)

    def _status_of(self, service: str) -> Any:
        found = self.services.get(service)
        return None if found is None else found.status()

    def _s3_door(self) -> S3Door | None:
        return cast("S3Door | None", self.doors.get(S3_DOOR))

    def _s3_status(self) -> dict[str, Any]:
        """Of the S3 door, with what those of the readers have counted."""
        door, readers = self._s3_door(), self.readers
        assert door is not None
        assert readers is not None
        return {**door.snapshot(), **summed([door.counters.snapshot(), readers.s3_counts()])}

    def _has_files(self, volume: Volume) -> bool:
        """Whether a volume of blocks is in use here, by /fs or S3: one agent of a pool uses it."""
        door = self._s3_door()
        if door is not None and door.holds_anything(volume.settings.tenant):
            return True
        return self.files is not None and self.files.gauges().is_anything

    def _unnamed(self, blocks: Sequence[bytes]) -> Sequence[bytes]:
        """Of some identifiers of blocks those that no file of this agent has, in /fs or by S3."""
        if self.not_served.keys() - {PROCESSES}:
            return ()  # names that are not open cannot be asked
        if self.files is not None and blocks:
            blocks = self.files.orphans(blocks)
        door = self._s3_door()
        return blocks if door is None or not blocks else door.orphans(blocks)

    def _files_status(self) -> dict[str, Any] | None:
        if self.files is None:
            return None
        return {**asdict(self.files.counters), **asdict(self.files.gauges())}

    def _traffic(self) -> dict[str, dict[str, int]]:
        """Of each door of a file system: bytes read, written, and copied once more than needed."""
        counts = {} if self.readers is None else self.readers.moved()
        guests = {} if self.readers is None else self.readers.guest_counts()
        for name, door in self.doors.items():
            if isinstance(door, DevFuseDoor):
                moved = door.session.traffic()
                copied = moved.bytes_read + moved.bytes_written  # by the kernel, between its pages and ours
            elif name.startswith(GUEST_DOORS):
                device = cast("VirtioFsDoor", door).device
                moved, copied = device.session.traffic(), device.bytes_copied
                by_readers = guests.get(name.removeprefix(GUEST_DOORS), {})
                moved.bytes_read += by_readers.get("bytes_read", 0)
                copied += by_readers.get("bytes_copied", 0)
            else:
                continue
            counts[name] = {**asdict(moved), "bytes_copied": copied}
        return counts
