"""A reader: a process of the agent that serves gets and writes values, beside the one that does all else.

readers.py starts it and keeps its mount. It has sessions to the enclosures, remembered directories and
workers of its own. It writes no directory: values that are put through it go into slots that the other
process lends and names (agent/pool/write/borrowed_slots.py). It is as current as that one: by the versions of
directories (agent/pool/volume/set_versions.py), and by serving only while both go by the same pool map.
What it does not serve it refuses by EREMOTE, and the client asks the other process.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from agent.attach.connect import connected
from agent.attach.inspect_namespaces import find_pool
from agent.attach.map_history import MapHistory, map_seal
from agent.attach.map_watch import MapWatch
from agent.attach.open_volumes import open_volumes
from agent.config.configuration import Configuration
from agent.errors import G35Error
from agent.fs.control.face import CONTROL_ROOT, ControlFace
from agent.fs.control.registered_memory import RegisteredMemory
from agent.fs.control.start_prestage import prestage_nothing
from agent.fs.doors import mounting
from agent.fs.doors.dev_fuse import DevFuseDoor
from agent.fs.fuse.session import FuseSession
from agent.fs.interface import EPOCH_BITS, RootFileSystem
from agent.fs.kv_face import KV_ROOT, KvFace
from agent.host_os import garbage
from agent.host_os.cpu_idle import keep_awake
from agent.host_os.per_user_bounds import Bounds
from agent.host_os.workers_on_duty import Roster
from agent.inline.secrets import RootKey, root_key_in
from agent.pool.access import ServedVolume, serve
from agent.pool.counters import total
from agent.pool.map.document import PoolMap
from agent.pool.map.map_seal import MapSeal
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.set_versions import SetVersions
from agent.pool.volume.uses import Uses
from agent.pool.volume.volume import Volume, in_sets
from agent.remote.channel import current_channel
from agent.remote.channel_pool import ChannelPool
from agent.remote.fabric import Fabric
from agent.service.queue_plan import granted_workers, queues_at
from agent.service.reader_link import Links, Order, Report, encode_report
from agent.service.slot_links import BorrowedLinks
from agent.service.upkeep import Duties
from agent.service.worker_channels import with_short_waits
from agent.tenancy.open_rates import OpenRates
from agent.tenancy.opening_keys import OpeningKeys
from agent.tenancy.visibility import Audience

if TYPE_CHECKING:
    from agent.s3.processes.reader_door import ReaderDoor
    from agent.service.reader_guests import ReaderGuests

log = logging.getLogger(__name__)

REPORT_SECONDS: Final = 0.25
FOLLOWED_SECONDS: Final = 10.0
"""Without a look at the pool map. A reader whose thread hangs there tells nothing more, which ends it."""
USES_AT_ONCE: Final = 1024
"""Of one report."""
OTHER_QUEUES: Final = 1
"""Beside the workers': that of the thread that follows the pool map."""
S3_GRACE_SECONDS: Final = 2.0
"""For requests of S3 that are under way at the end."""
HANDLE_BITS: Final = 40
"""Handles begin at a random number of so many bits, and inodes at another (`EPOCH_BITS`). A file that was
opened at an earlier process of this mount is nobody else's then."""


async def serve_reads(
    order: Order,
    fuse: int,
    versions: SetVersions,
    links: Links,
    hear: Callable[[], None],
) -> None:
    """Serve the mount behind the descriptor `fuse`, where the agent has one, until it is unmounted, or the
    other process is gone.

    `hear` waits for the latter.
    """
    configuration = Configuration.model_validate_json(order.configuration)
    settings = configuration.agent
    root = root_key_in(settings.key_file)
    seal = map_seal(root, settings.state)
    wanted, others = (
        settings.worker_count,
        OTHER_QUEUES + _s3_queues(order, configuration) + len(queues_at(configuration, order.number)),
    )
    async with connected(configuration, wanted + others) as supervisor:
        fabric = supervisor.fabric
        workers = granted_workers(fabric, wanted, others)
        supervisor.queues_in_use = workers + others
        channels = ChannelPool(fabric)
        reader: Reader | None = None
        try:
            first = channels.take(1)
            pool_map, _ = await trio.to_thread.run_sync(find_pool, fabric, first, seal)
            fabric.adopt([bytes.fromhex(namespace.nguid) for namespace in pool_map.namespaces])
            reader = await trio.to_thread.run_sync(
                Reader,
                order,
                configuration,
                versions,
                root,
                seal,
                fabric,
                channels,
                pool_map,
                workers,
                links,
            )
            await trio.to_thread.run_sync(reader.start, fuse, links.link)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_awake, settings.stay_awake, channels.work_done)
                if order.folder:
                    nursery.start_soon(_until, nursery, reader.door_ended)
                nursery.start_soon(_until, nursery, hear)
        finally:
            with trio.CancelScope(shield=True):
                if reader is not None:
                    await trio.to_thread.run_sync(reader.stop)
                await trio.to_thread.run_sync(channels.close)


def _s3_queues(order: Order, configuration: Configuration) -> int:
    return configuration.s3.workers if order.s3_listen else 0


async def _until(nursery: trio.Nursery, wait: Callable[[], None]) -> None:
    """End the nursery after `wait`, whose thread may be left behind: the process ends."""
    await trio.to_thread.run_sync(wait, abandon_on_cancel=True)
    nursery.cancel_scope.cancel()


class Reader:
    """The parts of a reader, whole when it is made."""

    def __init__(
        self,
        order: Order,
        configuration: Configuration,
        versions: SetVersions,
        root: RootKey,
        seal: MapSeal,
        fabric: Fabric,
        channels: ChannelPool,
        pool_map: PoolMap,
        workers: int,
        links: Links,
    ) -> None:
        """To be made on a thread that may block. Raises G35Error."""
        settings = configuration.agent
        self._versions, self._channels, self._workers = versions, channels, workers
        self._first_of_s3 = 1 + workers + OTHER_QUEUES
        """The queue id."""
        self._agreed, self._folder = order.negotiated, Path(order.folder)
        history = MapHistory(settings.state, is_kept=False)
        history.refuse(pool_map)
        pool_map = history.believed(pool_map)
        directories = DirectoryCache(settings.directory_cache // order.processes, versions)
        opened = in_sets(open_volumes(pool_map, root, configuration, directories))
        # One that was added since the first process began, it does not serve either.
        volumes = [each for each in opened if each.settings.volume_id.hex() in order.volumes]
        self._uses = Uses()
        for volume in volumes:
            volume.change(uses=self._uses)
        keys = OpeningKeys(pool_map, volumes, root)
        rates = OpenRates(pool_map, volumes, workers)

        def follow(newer: PoolMap) -> None:
            keys.follow(newer)
            rates.follow(newer)

        self._watch = MapWatch(pool_map, volumes, PrestageCache(0), history, root, fabric, seal, follow)
        self._rated: tuple[int, frozenset[bytes]] = (0, frozenset())
        # What was acknowledged and waits in memory is seen by its process alone; so is what a gate goes by.
        elsewhere = {each.volume for each in configuration.policies if each.write == "back"}
        elsewhere |= {each.volume for each in configuration.policies if each.prefill_tokens_per_s}
        borrowed = BorrowedLinks(
            links.slots, fabric, settings.timing.write_deadline, max(1, workers // 2),
            lends_single=settings.lends_single_slots, duty=lambda: current_channel().duty,
        )  # fmt: skip
        served = [
            serve(volume, slots=borrowed) for volume in volumes if volume.settings.name not in elsewhere
        ]
        own = Audience("agent", settings.tenants).key_value(served)
        registered = RegisteredMemory(settings.registered_memory)
        self._session = FuseSession(self._tree(order.number, own, registered))
        self._roster = Roster(workers)
        self._channel_of = with_short_waits(
            lambda number: self._channels.take(1 + number), settings.timing.read_deadline, self._roster
        )
        self._door: DevFuseDoor | None = None
        self._s3 = self._s3_door(order, configuration, volumes, links.s3) if order.s3_listen else None
        first_of_guests = self._first_of_s3 + _s3_queues(order, configuration)
        self._guests = self._reads_of_guests(order, configuration, links, served, first_of_guests)
        self._stopping = threading.Event()
        self._followed_at = time.monotonic()

    def start(self, fuse: int, link: socket.socket) -> None:
        """Serve on clones of the mount's descriptor, where there is one, and report. Raises MountError."""
        if self._agreed is not None:
            descriptors = [mounting.own_clone(fuse) for _ in range(self._workers)]
            os.close(fuse)
            self._door = DevFuseDoor(
                self._session, self._folder, self._workers, self._channel_of, roster=self._roster
            )
            self._session.resume(self._agreed)
            self._door.serve(descriptors)
        if self._s3 is not None:
            try:
                self._s3.start()
            except G35Error as error:
                log.error("this process of the agent serves no S3: %s (%s)", error, error.advice)
                self._s3 = None
        garbage.search_seldom()
        if self._guests is not None:
            self._guests.start()
        self._report(link)
        for name, work in (("map", self._follow), ("reports", lambda: self._tell(link))):
            threading.Thread(target=work, name=name, daemon=True).start()

    def stop(self) -> None:
        """Take no more requests of S3; the mount ends by itself."""
        if self._s3 is not None:
            self._s3.stop(S3_GRACE_SECONDS)

    def door_ended(self) -> None:
        """Wait for the end of the mount."""
        if self._door is not None:
            self._door.wait()

    def _follow(self) -> None:
        """Follow the pool map until the other process is gone. A look may wait for an enclosure."""
        channel = self._channels.take(1 + self._workers)
        duties = Duties({"following the pool map": lambda: channel.run(self._watch.look(channel))})
        while not self._stopping.wait(REPORT_SECONDS):
            duties.turn()
            self._followed_at = time.monotonic()

    def _tell(self, link: socket.socket) -> None:
        """Report until the other process is gone."""
        duties = Duties({"telling of gets": lambda: self._report(link)})
        while not self._stopping.wait(REPORT_SECONDS):
            if time.monotonic() - self._followed_at < FOLLOWED_SECONDS:
                duties.turn()

    def _report(self, link: socket.socket) -> None:
        readings = list(self._channels.tallies())
        names = {name for reading in readings for name in reading}
        tallies = {name: total(each[name] for each in readings if name in each) for name in names}
        uses, moved = self._uses.hand_over(), self._session.traffic().bytes_read
        s3 = {} if self._s3 is None else self._s3.counters.snapshot()
        guests = {} if self._guests is None else self._guests.moved()
        try:
            for start in range(0, max(1, len(uses)), USES_AT_ONCE):
                part = uses[start : start + USES_AT_ONCE]
                link.sendall(encode_report(Report(tallies, part, moved, is_ready=True, s3=s3, guests=guests)))
        except OSError:
            self._stopping.set()

    def _tree(self, number: int, own: Sequence[ServedVolume], registered: RegisteredMemory) -> RootFileSystem:
        owner, bounds = (os.geteuid(), os.getegid()), Bounds({0, os.geteuid()})
        first_handle = 1 + (secrets.randbits(HANDLE_BITS) << 20)
        epoch = secrets.randbits(EPOCH_BITS)

        def stats() -> dict[str, Any]:
            """What a client asks any process for: how long values may be."""
            sizes = [
                {"name": each.settings.name, "kind": "kv", "value_bytes": each.settings.value_bytes}
                for each in own
            ]
            return {"pid": os.getpid(), "process": number, "volumes": sizes}

        kv = KvFace(
            own, current_channel, None, owner, epoch, bounds=bounds, may_read=self._may_read,
            first_handle=first_handle,
        )  # fmt: skip
        control = ControlFace(
            own, current_channel, stats, prestage_nothing, None, owner, memory=registered, bounds=bounds,
            may_read=self._may_read, first_handle=first_handle,
        )  # fmt: skip
        return RootFileSystem({b"kv": (KV_ROOT, kv), b".g35": (CONTROL_ROOT, control)}, owner)

    def _s3_door(
        self,
        order: Order,
        configuration: Configuration,
        volumes: Sequence[Volume],
        sockets: Sequence[socket.socket],
    ) -> "ReaderDoor | None":
        from agent.s3.processes.make_reader_door import make_reader_door  # with h11, for who has the door

        erased = {each.name for each in self._watch.pool_map.tenants if each.is_erased}
        return make_reader_door(
            configuration, order.s3_listen, order.processes, sockets, volumes, self._may_read, erased,
            current_channel, lambda number: self._channels.take(self._first_of_s3 + number),
        )  # fmt: skip

    def _reads_of_guests(
        self,
        order: Order,
        configuration: Configuration,
        links: Links,
        served: Sequence[ServedVolume],
        first_queue: int,
    ) -> "ReaderGuests | None":
        if not configuration.virtiofs:
            return None
        from agent.service.reader_guests import ReaderGuests  # with virtio-fs, for who has guests

        take = with_short_waits(
            lambda number: self._channels.take(first_queue + number), configuration.agent.timing.read_deadline
        )
        return ReaderGuests(configuration, order.number, links, served, self._may_read, take)

    def _may_read(self, volume: ServedVolume | Volume) -> bool:
        """Whether gets of the volume are served here now."""
        pool_map = self._watch.pool_map
        if volume.erased or self._versions.map_version != pool_map.version or self._watch.is_listed_otherwise:
            return False
        version, tenants = self._rated
        if version != pool_map.version:
            # A rate is kept to where all of the tenant's gets come by.
            tenants = frozenset(bytes.fromhex(each.tenant_id) for each in pool_map.tenants if each.bandwidth)
            self._rated = (pool_map.version, tenants)
        return volume.settings.tenant not in tenants
