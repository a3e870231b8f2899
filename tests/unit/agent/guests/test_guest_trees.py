"""Two guests with trees of their own: neither finds, reads or lists what is the other's."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.config.configuration import VirtioFsSection
from agent.errors import ConfigError
from agent.fs.files.face import FilesFace
from agent.fs.files.options import FilesOptions
from agent.fs.interface import ROOT_INODE, Caller, FsError
from agent.fs.virtiofs.guest_view import GuestView
from agent.host_os.per_user_bounds import Bounds
from agent.pool.access import ServedVolume, serve
from agent.pool.map.document import tenant_id
from agent.pool.prestage.readahead import INACTIVE, Readahead
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.steps import settle
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from agent.service.doors import guest_tree
from agent.telemetry import snapshot
from agent.tenancy.visibility import Members
from tests.support.pool.inline_runner import InlineRunner
from tests.support.pool.memory_blocks import MemoryBlockStore
from tests.support.pool.memory_pool import MemoryPool

ROOT = Caller()
RUN = InlineRunner()


@dataclass
class Pool:
    volumes: list[Any]
    files: FilesFace
    prestage: PrestageCache
    sources: snapshot.Sources
    start_prestage: Any = None
    readahead: Readahead = INACTIVE
    registered: None = None
    readers: int = 0
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def served(self) -> list[ServedVolume]:
        return [serve(each) for each in self.volumes]

    @property
    def members(self) -> Members:
        """As if the pool map named what there is, and a tenant whose volume was erased."""
        tenants = {each.settings.tenant for each in self.volumes} | {bytes.fromhex(tenant_id("gone"))}
        names = {each.settings.name for each in self.volumes} | {"was-erased"}
        return Members(frozenset(tenants), frozenset(names))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    agent = MemoryPool().agent()
    files = FilesFace(tmp_path / "files.sqlite", MemoryBlockStore((512, 8192)), FilesOptions(cache_seconds=0))
    prestage = PrestageCache(1 << 20)
    sources = snapshot.Sources(
        pool_id="pool", map_version=lambda: 1, mount="/mnt", door="fuse", volumes=[agent.volume],
        fabric=Fabric([Enclosure("shelf")]), directories=agent.cache, prestage=prestage,
        tallies=lambda: [agent.channel.tallies], files=lambda: None,
    )  # fmt: skip
    yield Pool([agent.volume], files, prestage, sources)
    files.close()


def guest(pool: Pool, **wishes: Any) -> GuestView:
    wish = VirtioFsSection(socket=Path("/run/guest.sock"), **wishes)
    return GuestView(guest_tree(pool, wish, RUN))


def refused(code: int, operation: Callable[[], object]) -> None:
    with pytest.raises(FsError) as caught:
        settle(operation(), RUN)
    assert caught.value.errno == code


def find(view: GuestView, *names: bytes) -> int:
    node = ROOT_INODE
    for name in names:
        node = settle(view.lookup(ROOT, node, name), RUN).attributes.ino
    return node


def names_in(view: GuestView, node: int) -> set[bytes]:
    handle = settle(view.opendir(ROOT, node, 0), RUN).handle
    listed = settle(view.readdir(node, handle, 0), RUN)
    return {entry.name for entry in listed} - {b".", b".."}


def test_a_guest_sees_its_folder_as_the_whole_of_fs(pool: Pool) -> None:
    first, second = guest(pool, subtree="/gpu/0"), guest(pool, subtree="gpu/1/")
    everything = guest(pool)
    made, opened = settle(first.create(ROOT, find(first, b"fs"), b"secret", 0o666, os.O_RDWR), RUN)
    secret = made.attributes.ino
    assert names_in(first, find(first, b"fs")) == {b"secret"}
    assert names_in(second, find(second, b"fs")) == set()
    assert names_in(everything, find(everything, b"fs", b"gpu")) == {b"0", b"1"}
    assert find(everything, b"fs", b"gpu", b"0", b"secret") == secret
    refused(errno.ESTALE, lambda: second.open(ROOT, secret, 0))
    refused(errno.ESTALE, lambda: second.getattr(ROOT, secret, None))
    refused(errno.ESTALE, lambda: second.link(ROOT, secret, find(second, b"fs"), b"mine"))
    refused(errno.EBADF, lambda: second.read(secret, opened.handle, 0, memoryview(bytearray(8))))
    # The folders above a guest's own have numbers that are easily guessed.
    above = find(everything, b"fs")
    for node in range(above, above + 3):
        if node != find(second, b"fs"):
            refused(errno.ESTALE, lambda node=node: second.opendir(ROOT, node, 0))
            refused(errno.ESTALE, lambda node=node: second.lookup(ROOT, node, b"gpu"))


def test_volumes_that_are_not_named_are_not_there(pool: Pool) -> None:
    [volume] = pool.volumes
    name = volume.settings.name.encode()
    others = copy.copy(volume)
    others.settings = dataclasses.replace(volume.settings, name="others-own", tenant=b"other")
    pool.volumes.append(others)
    everything = guest(pool)
    assert names_in(everything, find(everything, b"kv")) == {name, b"others-own"}
    seeing = guest(pool, volumes=(name.decode(),), subtree="")
    assert names_in(seeing, find(seeing, b"kv")) == {name}
    refused(errno.ENOENT, lambda: seeing.lookup(ROOT, find(seeing, b"kv"), b"others-own"))
    status = settle(seeing.open(ROOT, find(seeing, b".g35", b"status.json"), 0), RUN).handle
    room = memoryview(bytearray(1 << 16))
    text = bytes(room[: settle(seeing.read(find(seeing, b".g35", b"status.json"), status, 0, room), RUN)])
    assert b"others-own" not in text
    assert b'"v"' in text
    assert names_in(seeing, ROOT_INODE) == {b"kv", b".g35"}
    with pytest.raises(ConfigError, match="no key-value or shared volume"):
        guest(pool, volumes=("others",))
    bare = guest(pool, volumes=("was-erased",), subtree="")
    assert names_in(bare, find(bare, b"kv")) == set(), "a guest of an erased tenant does not stop the others"


def test_a_guest_of_a_tenant_sees_its_volumes(pool: Pool) -> None:
    [volume] = pool.volumes
    for name, tenant in (("blue", "blue"), ("blue-too", "blue"), ("red", "red")):
        others = copy.copy(volume)
        ids = {"tenant": bytes.fromhex(tenant_id(tenant)), "volume_id": name.encode().ljust(16)}
        others.settings = dataclasses.replace(volume.settings, name=name, **ids)
        pool.volumes.append(others)
    blue = guest(pool, tenants=("blue",))
    assert names_in(blue, find(blue, b"kv")) == {b"blue", b"blue-too"}
    one = guest(pool, tenants=("blue", "red"), volumes=("red",))
    assert names_in(one, find(one, b"kv")) == {b"red"}
    gone = guest(pool, tenants=("gone",))
    assert names_in(gone, find(gone, b"kv")) == set()
    with pytest.raises(ConfigError, match="no tenant of this pool"):
        guest(pool, tenants=("blu",))
    # Volumes of blocks of somebody else stand behind /fs.
    blocks = copy.copy(volume)
    blocks.settings = dataclasses.replace(volume.settings, name="blocks", kind="files", tenant=b"x" * 16)
    pool.volumes.append(blocks)
    assert names_in(guest(pool, tenants=("blue",)), ROOT_INODE) == {b"kv", b".g35"}
    assert names_in(guest(pool), ROOT_INODE) == {b"kv", b".g35", b"fs"}


def test_a_file_in_the_way_of_a_folder(pool: Pool) -> None:
    everything = guest(pool)
    settle(everything.create(ROOT, find(everything, b"fs"), b"file", 0o644, os.O_RDWR), RUN)
    with pytest.raises(ConfigError, match="cannot be had"):
        guest(pool, subtree="/file/below")


def test_the_status_of_a_guest_that_sees_all_says_nothing_of_the_machine(pool: Pool) -> None:
    view = guest(pool)
    node = find(view, b".g35", b"status.json")
    handle = settle(view.open(ROOT, node, 0), RUN).handle
    room = memoryview(bytearray(1 << 16))
    status = json.loads(bytes(room[: settle(view.read(node, handle, 0, room), RUN)]))
    assert "pid" not in status
    assert status["mount"] == ""
    assert (status["memory"], status["files"], status["doors"]) == (None, None, {})
    assert not [name for name in status["totals"] if name.startswith("flash_bytes")]
    assert [each["name"] for each in status["volumes"]] == ["v"]
    assert [each["name"] for each in status["enclosures"]] == ["shelf"]
