"""`/shared` over a pool in memory: what a lost chunk, a damaged name and a full volume come to."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Sequence
from typing import Any

import pytest

from agent.fs.interface import LockOwner, SetAttributes
from agent.fs.shared.face import RENAME_NOREPLACE
from agent.fs.shared.file_writer import ASKED_SECONDS
from agent.fs.shared.manifest import HOLE, Manifest
from agent.fs.shared.names import Names
from agent.fs.shared.paths import chunk_key, path_key
from agent.fs.shared.volume import SharedVolume, Values
from agent.fs.value_writer import errno_of
from agent.host_os.per_user_bounds import Holder
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.steps import IoChannel, Steps, settle
from tests.support.fs.memory_shared import CALLER, CHUNK, MAKER, OTHER, Files, SharedPool, refused
from tests.unit.shared.test_shared_face import DATA


def test_a_file_that_has_lost_a_chunk_is_not_there(files: Files, others: Files) -> None:
    files.put("f", DATA)
    manifest = files.manifest("f")
    assert manifest is not None
    others.evict(others.chunks, chunk_key(manifest.identity, 3))
    refused(errno.ENOENT, files.open, "f")
    assert files.manifest("f") is None
    files.collect()
    assert files.taken() == 0


def test_a_chunk_that_is_lost_while_the_file_is_open_is_an_error(files: Files, others: Files) -> None:
    files.put("f", DATA)
    file = files.open("f")
    manifest = files.manifest("f")
    assert manifest is not None
    lost = chunk_key(manifest.identity, 3)
    settle(others.volume.chunks.delete(others.channel, lost, others.channel.now() + 5), others.channel)
    assert files.pread(file, 0, 3 * CHUNK) == DATA[: 3 * CHUNK]
    refused(errno.EIO, files.pread, file, 2 * CHUNK, 2 * CHUNK)
    assert files.pread(file, 4 * CHUNK, CHUNK) == DATA[4 * CHUNK : 5 * CHUNK]
    files.release(file)


def test_a_manifest_copied_to_another_name_is_no_file_there(files: Files) -> None:
    files.put("f", DATA)
    manifest = files.manifest("f")
    assert manifest is not None
    deadline = files.channel.now() + 5
    settle(
        files.volume.names.replace(files.channel, path_key(b"g"), manifest.encode(), deadline), files.channel
    )
    assert files.stat("g") is None
    assert files.get("f") == DATA
    settle(files.volume.names.replace(files.channel, path_key(b"h"), b"no manifest", deadline), files.channel)
    assert files.stat("h") is None


@pytest.mark.parametrize("fault", ["down", "broken"])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_an_enclosure_that_gives_no_answer_or_errors_is_a_miss_and_no_file_is_given_up(
    pool: SharedPool, files: Files, fault: str, flags: int
) -> None:
    files.put("f", DATA)
    for namespace in pool.namespaces[:2]:
        setattr(namespace, fault, True)
    refused(errno.ENOENT, files.open, "f", flags)
    for namespace in pool.namespaces[:2]:
        setattr(namespace, fault, False)
    assert files.get("f") == DATA


def test_a_stat_in_a_full_volume_gives_no_file_up_whose_directories_come_damaged() -> None:
    pool = SharedPool((1,), (2,))
    files = pool.agent()
    for number in range(16):
        files.put(f"f{number}", DATA[: 4 * CHUNK])
    pool.namespaces[0].broken = True
    assert not any(files.stat(f"f{number}") for number in range(16))
    pool.namespaces[0].broken = False
    for number in range(16):
        assert files.get(f"f{number}") == DATA[: 4 * CHUNK]


@pytest.mark.parametrize("fault", ["down", "broken"])
def test_a_folder_that_cannot_be_read_just_now_is_there_for_who_writes(
    pool: SharedPool, files: Files, others: Files, fault: str
) -> None:
    files.mkdir("d", 0o770)
    files.mkdir("e")
    files.put("e/f", DATA)
    for namespace in pool.namespaces[2:]:
        setattr(namespace, fault, True)
    for name in "de":
        assert files.stat(name) is not None
        file = files.create(f"{name}/g")
        files.pwrite(file, 0, b"short")
        refused(errno.EIO, files.close, file)
        refused(errno.ENOTEMPTY, files.rmdir, "e")
    refused(errno.ENOENT, others.create, "d/g")
    for namespace in pool.namespaces[2:]:
        setattr(namespace, fault, False)
    for each in files, others:
        found = each.stat("d")
        assert found is not None
        assert found.mode & 0o7777 == 0o750, "the folder is as its maker left it"
    assert files.get("e/f") == DATA
    files.rmdir("d")
    assert files.stat("d") is None
    assert others.stat("d") is None


@pytest.mark.interpreted
@pytest.mark.parametrize("call", ["mkdir", "rename", "chmod", "unlink"])
def test_what_is_there_is_not_replaced_because_the_look_at_it_came_too_late(
    pool: SharedPool, files: Files, others: Files, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive pauses for as long as a change waits, and answers again with the next request."""
    files.put("f", DATA)
    if call == "chmod":
        others.mkdir("g", 0o700)
        node = files.lookup("g").attributes.ino
    else:
        others.put("g", DATA[:CHUNK])
    look = Names.newest

    def newest(names: Names, volume: SharedVolume, path: bytes) -> Steps[Manifest | MissCause]:
        for namespace in pool.namespaces:
            namespace.hung = path == b"g"
        found = yield from look(names, volume, path)
        for namespace in pool.namespaces:
            namespace.hung = False
        return found

    monkeypatch.setattr(Names, "newest", newest)
    if call == "mkdir":
        refused(errno.EIO, files.mkdir, "g")
    elif call == "chmod":
        asked = files.face.setattr(CALLER, node, SetAttributes(uid=7), None)
        refused(errno.EIO, files.settle, asked)
        monkeypatch.undo()
        found = others.stat("g")
        assert found is not None
        assert found.mode & 0o7777 == 0o700
        return
    elif call == "unlink":
        file = files.create("g")
        refused(errno.EIO, files.unlink, "g")
        files.close(file)
    else:
        refused(errno.EIO, files.rename, "f", "g", RENAME_NOREPLACE)
        refused(errno.EIO, files.rename, "f", "g")
    monkeypatch.undo()
    assert others.get("g") == DATA[:CHUNK]
    assert others.get("f") == DATA


@pytest.mark.parametrize("flags", [os.O_APPEND, os.O_EXCL])
def test_a_file_that_this_agent_knows_is_not_made_anew_while_an_enclosure_is_away(
    pool: SharedPool, files: Files, flags: int
) -> None:
    """The kernel makes what a lookup did not find, and its close would put the new file in the place."""
    files.put("f", DATA)
    for namespace in pool.namespaces:
        namespace.down = True
    assert files.stat("f") is None
    made = files.face.create(CALLER, files.root, b"f", 0o644, os.O_WRONLY | os.O_CREAT | flags)
    refused(errno.EIO, files.settle, made)
    for namespace in pool.namespaces:
        namespace.down = False
    assert files.get("f") == DATA


class Doubtful:
    """Chunks of which nobody says just now whether they are there; all else is as in `chunks`."""

    def __init__(self, chunks: Values, cause: MissCause) -> None:
        self._chunks, self._cause = chunks, cause

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunks, name)

    def are_named(self, channel: IoChannel, keys: Sequence[bytes]) -> bool | None:
        return None

    def hold(
        self, channel: IoChannel, keys: Sequence[bytes], deadline: float, holder: Holder
    ) -> Steps[MissCause]:
        yield from ()
        return self._cause


@pytest.mark.parametrize(
    ("cause", "eighths", "number"),
    [
        (MissCause.CORRUPT, 6, errno.EIO),
        (MissCause.LATE, 6, errno.EIO),
        (MissCause.EXPIRED, 6, errno.EIO),
        (MissCause.EVICTED, 4, errno.EIO),
        (MissCause.EVICTED, 6, errno.ENOSPC),
    ],
)
def test_a_large_file_that_cannot_be_asked_for_is_not_one_that_is_too_large(
    cause: MissCause, eighths: int, number: int
) -> None:
    """Half of each set is held: so much of a file has room for sure."""
    files = SharedPool((1,), (2,)).agent()
    doubtful: Any = Doubtful(files.volume.chunks, cause)
    files.face._volumes[files.root] = dataclasses.replace(files.volume, chunks=doubtful)
    file = files.create("f")
    for chunk in range(files.volume.chunks_max * eighths // 8):
        files.pwrite(file, chunk * CHUNK, bytes(CHUNK))
    files.channel.clock += ASKED_SECONDS
    refused(number, files.flush, file)
    files.release(file)
    assert files.stat("f") is None


def test_a_file_is_written_around_an_enclosure_that_takes_nothing(pool: SharedPool, files: Files) -> None:
    pool.namespaces[0].down = True
    files.put("f", DATA)
    pool.namespaces[0].down = False
    assert files.get("f") == DATA


def test_a_file_larger_than_its_volume_is_refused_and_leaves_nothing(files: Files) -> None:
    most = files.volume.chunks_max
    file = files.create("f")
    files.pwrite(file, 0, DATA)
    refused(errno.ENOSPC, files.pwrite, file, most * CHUNK, b"x")
    refused(errno.ENOSPC, files.pwrite, file, 0, b"x")
    refused(errno.ENOSPC, files.close, file)
    assert files.stat("f") is None
    files.collect()
    assert files.taken() == 0
    sparse = files.create("s")
    refused(errno.ENOSPC, files.ftruncate, sparse, 1 << 60)
    files.release(sparse)


def test_a_file_that_has_evicted_itself_is_refused() -> None:
    files = SharedPool((1,), (2,)).agent()
    file = files.create("f")
    most = files.volume.chunks_max
    for number in range(most - 6):
        files.pwrite(file, number * CHUNK, number.to_bytes(8, "little") * (CHUNK // 8))
    files.put("g", DATA * 2)
    refused(errno.ENOSPC, files.flush, file)
    files.release(file)
    assert files.stat("f") is None


def test_what_a_file_writes_in_part_is_bounded(files: Files) -> None:
    file = files.create("f")
    for number in range(40):
        files.pwrite(file, number * CHUNK + 5, b"x")
    assert files.face._staged.held <= 16 * CHUNK
    files.close(file)
    assert files.face._staged.held == 0
    wanted = bytearray(39 * CHUNK + 6)
    for number in range(40):
        wanted[number * CHUNK + 5 : number * CHUNK + 6] = b"x"
    assert files.get("f") == bytes(wanted)


def test_the_holes_of_a_file_are_told_from_what_is_lost(files: Files) -> None:
    file = files.create("f")
    files.ftruncate(file, 2 * CHUNK)
    files.close(file)
    manifest = files.manifest("f")
    assert manifest is not None
    assert [run.origin for run in manifest.runs] == [HOLE]
    assert files.get("f") == bytes(2 * CHUNK)


def test_another_process_writes_beside_and_the_last_close_wins(files: Files, others: Files) -> None:
    first = files.create("f", flags=os.O_WRONLY | os.O_TRUNC)
    second = files.create("f", OTHER, os.O_WRONLY | os.O_TRUNC)
    files.pwrite(first, 0, DATA)
    files.pwrite(second, 0, DATA[::-1], LockOwner(22, OTHER.pid))
    files.close(first)
    assert others.get("f") == DATA
    files.close(second, LockOwner(22, OTHER.pid))
    assert others.get("f") == DATA[::-1]
    assert MAKER.pid != OTHER.pid


def test_no_room_while_an_enclosure_is_away_is_an_error_of_the_enclosure() -> None:
    assert errno_of(PutRefused("full")) == errno.ENOSPC
    assert errno_of(PutRefused("full", passes=True)) == errno.EIO
    assert errno_of(PutRefused("no answer", MissCause.LATE)) == errno.EIO


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
@pytest.mark.parametrize("by", [0, 1])
def test_a_late_delete_of_another_agent_costs_a_whole_file_and_never_a_part(
    flags: int, by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other agent has read the directory, this one names chunks in it, and the delete writes it last."""
    pool = SharedPool((1,), (1,))
    files, others = pool.agent(), pool.agent()
    others.put("old", DATA)
    others.unlink("old")
    write, first = others.channel.write, [True]

    def write_late(*what: Any, **how: Any) -> object:
        if first and first.pop():
            files.put("f", DATA)
        return write(*what, **how)

    monkeypatch.setattr(others.channel, "write", write_late)
    others.collect()
    assert files.manifest("f") is not None
    assert not files.taken(), "the image of the delete has none of the chunks"
    agent = (files, others)[by]
    refused(errno.ENOENT, agent.open, "f", flags)
    for each in files, others:
        assert each.manifest("f") is None
        assert each.stat("f") is None
    files.put("f", DATA)
    assert others.get("f") == DATA


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_a_file_that_is_replaced_between_its_lookup_and_its_open_is_looked_up_again(
    files: Files, flags: int
) -> None:
    """The name leads to a whole file all the time, so nobody may hear that there is none."""
    files.put("f", DATA)
    ino = files.lookup("f").attributes.ino
    files.put("other", DATA[::-1])
    files.rename("other", "f")
    files.collect()
    refused(errno.ESTALE, lambda: files.settle(files.face.open(CALLER, ino, flags)))
    assert files.get("f") == DATA[::-1]
