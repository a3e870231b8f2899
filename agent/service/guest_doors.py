"""The doors of guests: for each `[[virtiofs]]` of the configuration the tree that it shows, and its device.

Guests are kept apart by what stands behind their doors, not by checks alone: each has faces `/kv` and
`/.g35` of its own, over the volumes that are its, and `/fs` from its folder on. The nodes of `/fs` are
shared by all, so in front of the tree stands a `GuestView` that knows what this guest was told of.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from agent.config.configuration import VirtioFsSection
from agent.errors import ConfigError
from agent.fs.control.face import CONTROL_ROOT, ControlFace, StartPrestage
from agent.fs.files.face import FilesFace
from agent.fs.interface import FACE_FILES, FACE_SHIFT, Caller, FileSystem, FsError
from agent.fs.kv_face import KV_ROOT, KvFace
from agent.fs.root import RootFileSystem
from agent.fs.virtiofs.door import VirtioFsDoor
from agent.fs.virtiofs.guest_books import IDENTITY_BYTES, GuestBooks
from agent.fs.virtiofs.guest_view import HANDLES, HANDLES_MAX, NODES, NODES_MAX
from agent.host_os.bounds import Bounds
from agent.pool.access import ServedVolume
from agent.pool.prestage.readahead import Readahead
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.steps import Runner, settle
from agent.remote.channel import WorkerLanes, current_lanes
from agent.telemetry import snapshot
from agent.tenancy.visibility import Audience, Members

FILES_ROOT = FACE_FILES << FACE_SHIFT | 1
FOLDER_MODE = 0o755


class Pool(Protocol):
    """What of the agent a guest's tree is made from."""

    files: FilesFace | None
    prestage: PrestageCache
    continuer: Readahead
    sources: snapshot.Sources
    members: Members
    bounds: Bounds

    @property
    def served(self) -> Sequence[ServedVolume]: ...

    @property
    def start_prestage(self) -> StartPrestage: ...


def make_guest_doors(
    pool: Pool,
    wishes: tuple[VirtioFsSection, ...],
    queues: Sequence[range],
    take_lanes: Callable[[int], WorkerLanes],
    state: Path,
) -> list[VirtioFsDoor]:
    """A door for each wish; the books of their guests lie in `state`.

    `queues`: for each wish the I/O queue ids of its request queues (agent/service/queue_plan.py). Raises
    ConfigError where a wish names what is not there.
    """
    doors = []
    for number, (wish, ids) in enumerate(zip(wishes, queues, strict=True)):

        def lanes_of(index: int, ids: range = ids) -> WorkerLanes:
            return take_lanes(ids[index])

        shown = f"{pool.sources.pool_id}\0{wish.subtree}\0{','.join(wish.volumes)}".encode()
        if wish.tenants:
            shown += b"\0" + "\0".join(wish.tenants).encode()
        identity = hashlib.blake2b(shown, digest_size=IDENTITY_BYTES).digest()
        books = GuestBooks(state / f"virtiofs-{number}.books", identity)
        doors.append(
            VirtioFsDoor(
                guest_tree(pool, wish, lanes_of(0), books.epoch),
                wish.socket,
                len(ids),
                lanes_of,
                sealed_memory=wish.sealed_memory,
                books=books,
                name=f"virtiofs-{number}",
            )
        )
    views = {f"virtiofs-{number}": door.device.view for number, door in enumerate(doors)}
    if views:
        most = len(views)
        pool.bounds.watch(
            NODES,
            lambda: {name: view.held[0] for name, view in views.items()},
            lambda: sum(view.nodes_refused for view in views.values()),
            most * NODES_MAX,
        )
        pool.bounds.watch(
            HANDLES,
            lambda: {name: view.books.opens for name, view in views.items()},
            lambda: sum(view.opens_refused for view in views.values()),
            most * HANDLES_MAX,
        )
    return doors


def guest_tree(pool: Pool, wish: VirtioFsSection, runner: Runner, epoch: int = 0) -> RootFileSystem:
    """What one guest sees. `runner` drives the making of its folder."""
    owner = (os.geteuid(), os.getegid())
    audience = Audience("virtiofs", wish.tenants, wish.volumes)
    audience.check(pool.members)
    own = audience.key_value(pool.served)
    faces: dict[bytes, tuple[int, FileSystem]] = {
        b"kv": (
            KV_ROOT,
            KvFace(own, current_lanes, pool.prestage, owner, epoch, pool.continuer, bounds=pool.bounds),
        )
    }
    if wish.subtree and pool.files is not None and audience.shows_files(pool.served):
        faces[b"fs"] = (folder_of(pool.files, wish.subtree, owner, runner), pool.files)
    # Also a guest that sees every volume sees nothing of the machine that serves it, nor of other guests.
    sources = dataclasses.replace(
        audience.sources(pool.sources, own),
        mount="",
        door="virtiofs",
        volumes=[each.volume for each in own],
        files=lambda: None,
        doors=dict,
        whole=False,
        guest=True,
    )
    control = ControlFace(
        own,
        current_lanes,
        lambda: snapshot.take(sources),
        pool.start_prestage,
        pool.prestage,
        owner,
        pool.continuer,
        bounds=pool.bounds,
    )
    faces[b".g35"] = (CONTROL_ROOT, control)
    return RootFileSystem(faces, owner)


def folder_of(files: FilesFace, path: str, owner: tuple[int, int], runner: Runner) -> int:
    """The node of a folder of /fs; what is missing of the path is made. Raises ConfigError."""
    caller = Caller(*owner, umask=0)
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
