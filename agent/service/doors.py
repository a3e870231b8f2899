"""Every door of the configuration, and the tree that it shows.

Tenants and guests are kept apart by the faces behind their doors, not by checks alone: each tree has faces
`/kv`, `/shared` and `/.g35` of its own, over the volumes that it may show, and `/fs` from its folder on. All
guests share the nodes of `/fs`, so in front of a guest's tree stands a `GuestView` that knows the nodes this
guest was told of.

Only what a configured door needs is loaded: the doors of S3, of queries and of guests bring HTTP, XML and
vhost-user along, which would be a sixth of the start of an agent that has only a mount."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from agent.config.configuration import Configuration, VirtioFsSection
from agent.errors import ConfigError
from agent.fs.after_reply import AfterReply
from agent.fs.control.face import CONTROL_ROOT, SESSION_INO, ControlFace
from agent.fs.control.registered_memory import RegisteredMemory
from agent.fs.control.start_prestage import StartPrestage
from agent.fs.doors.door import Door
from agent.fs.doors.make_door import make_door
from agent.fs.doors.mounting import MountOptions, clear_dead_mount, refuse_to_cover
from agent.fs.doors.parked_requests import ParkedRequests
from agent.fs.files.face import FilesFace
from agent.fs.files.options import FilesOptions
from agent.fs.guest_sessions import GuestWords, shared_words
from agent.fs.interface import EPOCH_BITS, FACE_FILES, FACE_SHIFT, Caller, FileSystem, FsError, RootFileSystem
from agent.fs.kv_face import KV_ROOT, KvFace
from agent.fs.shared.discards import Discards
from agent.fs.shared.face import SharedFace
from agent.fs.shared.nodes import SHARED_ROOT
from agent.fs.shared.recent_names import NamesSeen
from agent.fs.shared.unnamed import UnnamedChunks
from agent.fs.shared.volume import SharedVolume
from agent.host_os.per_user_bounds import Bounds
from agent.host_os.workers_on_duty import Roster
from agent.pool.access import ServedVolume
from agent.pool.prestage.readahead import Readahead
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.steps import Runner, settle
from agent.pool.volume.volume import PoolVolume
from agent.remote.channel import WorkerChannel, current_channel
from agent.remote.long_waits import LongWaits
from agent.service.queue_plan import QueuePlan, process_of
from agent.service.worker_channels import with_waits
from agent.telemetry import snapshot
from agent.tenancy.visibility import Audience, Members

if TYPE_CHECKING:
    from agent.fs.virtiofs.door import VirtioFsDoor

Doors: TypeAlias = dict[str, Door]
"""By their names: `fuse`, `virtiofs-0` and so on, `s3`, and `query`."""
MOUNT_DOOR = "fuse"
GUEST_DOORS = "virtiofs-"
"""How the names of guests' doors begin."""
S3_DOOR = "s3"
QUERY_DOOR = "query"
FILES_ROOT = FACE_FILES << FACE_SHIFT | 1
FOLDER_MODE = 0o755


@dataclass(frozen=True, slots=True)
class Shown:
    """The parts of an agent that the trees of its doors are made from."""

    served: Sequence[ServedVolume]
    members: Members
    files: FilesFace | None
    sources: snapshot.Sources
    bounds: Bounds
    prestage: PrestageCache
    readahead: Readahead
    start_prestage: StartPrestage
    discards: Discards
    """Of all faces `/shared`, as is what follows."""
    names_seen: NamesSeen
    unnamed: UnnamedChunks
    after_reply: AfterReply
    registered: RegisteredMemory | None = None
    """For clients on this machine: none behind a guest's door."""
    readers: int = 0
    """Other processes of the agent, which clients on this machine may ask."""


def make_doors(
    configuration: Configuration,
    queues: QueuePlan,
    take_channel: Callable[[int], WorkerChannel],
    shown: Shown,
    volumes: Sequence[PoolVolume],
    erased_tenants: set[str],
) -> Doors:
    """Every door of the configuration, none of them open yet. Raises ConfigError."""
    settings = configuration.agent
    audience = Audience("agent", settings.tenants)
    audience.check(shown.members)
    doors: Doors = {}
    if settings.mount is not None:
        own, files_root = audience.key_value(shown.served), 0
        if audience.shows_files(shown.served):
            files_root = FILES_ROOT
        sources = audience.sources(shown.sources, audience.in_status(shown.served))
        tree = _tree(shown, audience, own, sources, files_root, secrets.randbits(EPOCH_BITS))
        clear_dead_mount(settings.mount)
        settings.mount.mkdir(parents=True, exist_ok=True)
        refuse_to_cover(settings.mount)
        waits = LongWaits(len(queues.workers), settings.timing.read_deadline)
        parked = roster = None
        if settings.door == "fuse":
            parked, roster = ParkedRequests(waits.has_room), Roster(settings.workers)
            parked.watch(shown.bounds)
        doors[MOUNT_DOOR] = make_door(
            "dev_fuse" if settings.door == "fuse" else "pyfuse3",
            tree,
            settings.mount,
            settings.workers,
            with_waits(
                lambda number: take_channel(queues.workers[number]),
                waits,
                roster,
                may_park=parked is not None,
            ),
            MountOptions(allow_other=settings.allow_other or None),
            shown.after_reply,
            parked,
            roster,
        )
    for_guests = dataclasses.replace(shown, registered=None, readers=0)
    guests = {
        f"{GUEST_DOORS}{number}": _guest_door(
            configuration, number, wish, ids, take_channel, for_guests, 1 + shown.readers
        )
        for number, (wish, ids) in enumerate(zip(configuration.virtiofs, queues.guests, strict=True))
    }
    if guests:
        _watch_guests(shown.bounds, guests)
    doors |= guests
    s3 = configuration.s3
    if s3.listen:
        from agent.s3.make_door import make_s3_door

        options = FilesOptions(s3.staging, on_full=configuration.files.on_full, workers=s3.workers)
        doors[S3_DOOR] = make_s3_door(
            s3,
            volumes,
            settings.state,
            options,
            current_channel,
            lambda number: take_channel(queues.s3[number]),
            erased_tenants,
            shown.sources.pool_id,
            shown.sources.not_served,
            shown.bounds,
            configuration.fabric.verbs_provider,
            lambda: [each.address for each in shown.sources.fabric.enclosures if each.address],
            is_shared=shown.readers > 0,
        )
    if configuration.query.listen:
        from agent.query.door import make_query_door

        doors[QUERY_DOOR] = make_query_door(
            configuration.query,
            shown.served,
            shown.prestage,
            current_channel,
            shown.sources.fabric.is_away,
            lambda number: take_channel(queues.query[number]),
            erased_tenants,
            shown.bounds,
        )
    return doors


def _tree(
    shown: Shown,
    audience: Audience,
    own: Sequence[ServedVolume],
    sources: snapshot.Sources,
    files_root: int,
    epoch: int = 0,
    words: GuestWords | None = None,
) -> RootFileSystem:
    """The tree of one door, owned by the agent's user. `own`: its key-value volumes. `files_root`: its node
    of /fs, or 0."""
    owner = (os.geteuid(), os.getegid())
    kv = KvFace(own, current_channel, shown.prestage, owner, epoch, shown.readahead, bounds=shown.bounds)
    faces: dict[bytes, tuple[int, FileSystem]] = {b"kv": (KV_ROOT, kv)}
    if files_root and shown.files is not None:
        faces[b"fs"] = (files_root, shown.files)
    shared = [
        SharedVolume(
            each.chunks.settings.name,
            each.chunks,
            each.names,
            each.chunks.volume.usage,
            each.names.volume.usage,
        )
        for each in audience.shared(shown.served)
    ]
    if shared:
        faces[b"shared"] = (SHARED_ROOT, _shared_face(shown, shared, owner, epoch))
    control = ControlFace(
        own,
        current_channel,
        lambda: snapshot.take(sources),
        shown.start_prestage,
        shown.prestage,
        owner,
        shown.readahead,
        shown.registered,
        shown.bounds,
        readers=shown.readers,
        words=words,
    )
    faces[b".g35"] = (CONTROL_ROOT, control)
    return RootFileSystem(faces, owner)


def _shared_face(
    shown: Shown, volumes: Sequence[SharedVolume], owner: tuple[int, int], epoch: int
) -> SharedFace:
    def ahead(volume: SharedVolume, key: bytes) -> object:
        assert isinstance(volume.chunks, ServedVolume)
        return shown.start_prestage(volume.chunks, key)

    return SharedFace(
        volumes,
        current_channel,
        shown.discards,
        shown.prestage,
        owner,
        epoch,
        ahead if shown.prestage.budget_bytes else None,
        bounds=shown.bounds,
        seen=shown.names_seen,
        unnamed=shown.unnamed,
        after_reply=shown.after_reply,
    )


def _guest_door(
    configuration: Configuration,
    number: int,
    wish: VirtioFsSection,
    ids: range,
    take_channel: Callable[[int], WorkerChannel],
    shown: Shown,
    processes: int,
) -> VirtioFsDoor:
    """`ids`: the I/O queue ids of its request queues. The guest's books lie in the state folder. `processes`:
    of the agent, between which its queues are divided."""
    from agent.fs.virtiofs.door import VirtioFsDoor
    from agent.fs.virtiofs.guest_books import IDENTITY_BYTES, GuestBooks
    from agent.fs.virtiofs.processes.queue_places import GuestProcesses

    parts = f"{shown.sources.pool_id}\0{wish.subtree}\0{','.join(wish.volumes)}".encode()
    if wish.tenants:
        parts += b"\0" + "\0".join(wish.tenants).encode()
    identity = hashlib.blake2b(parts, digest_size=IDENTITY_BYTES).digest()
    books = GuestBooks(configuration.agent.state / f"virtiofs-{number}.books", identity)
    waits = LongWaits(len(ids), configuration.agent.timing.read_deadline)
    words_descriptor = shared_words() if processes > 1 else -1
    words = GuestWords(words_descriptor) if processes > 1 else None
    tree = guest_tree(shown, wish, take_channel(ids[0]), books.epoch, words)
    shared = None
    if words is not None:
        face = cast(ControlFace, tree.face(SESSION_INO))
        of_queue = [process_of(number, queue, processes) for queue in range(len(ids))]
        shared = GuestProcesses(of_queue, words, words_descriptor, face.bindings, SESSION_INO)
    return VirtioFsDoor(
        tree,
        wish.socket,
        len(ids),
        with_waits(lambda number: take_channel(ids[number]), waits),
        sealed_memory=wish.sealed_memory,
        books=books,
        name=f"{GUEST_DOORS}{number}",
        processes=shared,
    )


def guest_tree(
    shown: Shown, wish: VirtioFsSection, runner: Runner, epoch: int = 0, words: GuestWords | None = None
) -> RootFileSystem:
    """What one guest sees. `runner` drives the making of its folder. `words`: where readers serve some of its
    queues. Raises ConfigError."""
    audience = Audience("virtiofs", wish.tenants, wish.volumes)
    audience.check(shown.members)
    own, root = audience.key_value(shown.served), 0
    if wish.subtree and shown.files is not None and audience.shows_files(shown.served):
        root = _folder_of(shown.files, wish.subtree, runner)
    sources = audience.sources(shown.sources, audience.in_status(shown.served), guest=True)
    return _tree(shown, audience, own, sources, root, epoch, words)


def _folder_of(files: FilesFace, path: str, runner: Runner) -> int:
    """The node of a folder of /fs; what is missing of the path is made. Raises ConfigError."""
    caller = Caller(os.geteuid(), os.getegid(), umask=0)
    node = FILES_ROOT
    for name in filter(None, path.encode().split(b"/")):
        try:
            try:
                entry = settle(files.lookup(caller, node, name), runner)
            except FsError as refusal:
                if refusal.errno != errno.ENOENT:
                    raise
                entry = settle(files.mkdir(caller, node, name, FOLDER_MODE), runner)
        except FsError as refusal:
            raise ConfigError(
                f"virtiofs.subtree {path!r} cannot be had: {os.strerror(refusal.errno)}",
                "name a folder of /fs",
            ) from None
        node = entry.attributes.ino
    return node


def _watch_guests(bounds: Bounds, guests: dict[str, VirtioFsDoor]) -> None:
    from agent.fs.virtiofs.guest_view import HANDLES, HANDLES_MAX, NODES, NODES_MAX

    views = {name: door.device.view for name, door in guests.items()}
    bounds.watch(
        NODES,
        lambda: {name: view.held[0] for name, view in views.items()},
        lambda: sum(view.nodes_refused for view in views.values()),
        len(views) * NODES_MAX,
    )
    bounds.watch(
        HANDLES,
        lambda: {name: view.books.opens for name, view in views.items()},
        lambda: sum(view.opens_refused for view in views.values()),
        len(views) * HANDLES_MAX,
    )
