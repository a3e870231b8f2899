"""A file of /shared that is being written: any order of writes, whole or absent for everybody else.

A chunk that one write covers is stored at once, from the door's buffer. A longer one, which comes in whole
units, is sealed and sent as they come (growing_chunk.py). The others are staged in memory until they are
covered, or until the file is closed (file_content.py). Directories name the chunks later, many in one step,
and before the manifest goes (agent/pool/write/name_together.py). A chunk that was stored and is written again
is stored under another origin (manifest.py), so a reader of an earlier content finds what it was promised.
The manifest goes last and makes the file visible, under the name that the file has then.

| event | the file |
| --- | --- |
| a close that says it is whole (file_users.py: WHOLE), or that nobody can judge (UNTOLD) | is published |
| nobody has it open any more, and all that wrote have closed it | is published |
| a process that wrote dies with it open, or its maker does (DYING) | is dropped, later calls get EIO |
| a chunk cannot be stored, or the volume has no room for the file | is dropped, later calls get that error |
| a write after it was published | begins the next content, from the published one |

Chunks of a file that is dropped are deleted. Several threads may write whole chunks at the same time.
"""

# One idea in one file: the life of one file from its first write to its manifest, which is one class.

import contextlib
import errno
import threading
from collections.abc import Callable
from typing import Final

from agent.fs.after_reply import AfterReply
from agent.fs.close_cause import how_closed
from agent.fs.file_users import Closed, FileUsers, Judge
from agent.fs.interface import Caller, FsError, LockOwner, SetAttributes
from agent.fs.shared.chunks import (
    pieces,
    wall_ns,
)
from agent.fs.shared.discards import BuiltOn, Discards
from agent.fs.shared.file_content import NO_END, FileContent
from agent.fs.shared.file_reader import hold_all, let_go
from agent.fs.shared.gaps import is_newest, stays, why_not_whole
from agent.fs.shared.manifest import HOLE, Kind, Manifest, runs_of, time_told
from agent.fs.shared.paths import chunk_key, path_key, split
from agent.fs.shared.unnamed import (
    UnnamedChunks,
)
from agent.fs.shared.volume import SharedVolume
from agent.fs.value_writer import errno_of
from agent.host_os.per_user_bounds import Bound
from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused, ReplacedMeanwhile
from agent.pool.steps import IoChannel, Steps

ASKED_SECONDS: Final = 5.0
"""A file that took longer than this is asked for before it is published, where several agents use the pool:
this one does not hear of what others evict."""


class FileWriter(FileContent):
    """One file on its way in. Safe from any thread."""

    def __init__(
        self,
        volume: SharedVolume,
        path: bytes,
        ino: int,
        caller: Caller,
        mode: int,
        now_ns: int,
        staged: Bound,
        discards: Discards,
        judge: Judge = how_closed,
        base: Manifest | None = None,
        replaced: Manifest | None = None,
        published: "Callable[[FileWriter], None]" = lambda _: None,
        identity: bytes | None = None,
        unnamed: UnnamedChunks | None = None,
        after_reply: AfterReply | None = None,
    ) -> None:
        """`base`: the content that it begins with. `replaced`: what its name led to before, if that is
        known. `identity`: of the content, where the directories of its first chunk were read already."""
        super().__init__(volume, path, caller.holder, staged, discards, base, identity, unnamed, after_reply)
        self.opens = self.ending = 0  # how often it is open, and how many last closes are under way
        self.unlinked = False  # or its name was taken away, so that the file is never published
        self.mode, self.uid, self.gid = mode, caller.uid, caller.gid
        before = base or replaced
        if before is not None:
            self.uid, self.gid = before.uid, before.gid
        self.opener_uid: Final = caller.uid
        self._over = [] if before is None else [before.identity]
        """The contents whose place it may take where it has bytes that nobody wrote here."""
        self.atime_ns = self.mtime_ns = self.ctime_ns = now_ns
        self.users: Final = FileUsers(ino, caller.pid, judge)
        self.built_on: Final = BuiltOn(discards)
        self._published = published
        self._replaced = replaced

    # -- what a door asks -------------------------------------------------------------------------

    def write(self, channel: IoChannel, offset: int, data: memoryview, holder: LockOwner) -> Steps[None]:
        """Take bytes. Raises FsError; after a failure for good."""
        deadline = channel.now() + self.volume.timing.write_deadline
        yield from self._take(channel, deadline)
        change = self._begin_change()
        try:
            self._check()
            self._keep_rest(channel)
            self.users.note(holder)
            self._check_room(offset + len(data))
            self._go_on()
            chunk_bytes, end = self._chunk_bytes, offset + len(data)
            if offset > self.length:
                self.gaps.add(self.length // chunk_bytes)
            for number, at, part in pieces(offset, data, chunk_bytes):
                yield from self._until_quiet(channel, deadline, number)
                if len(part) == chunk_bytes:
                    self._unstage(number)
                    self._drop_growing(number)
                    self.gaps.filled(number)
                elif not (yield from self._grows(channel, number, at, len(part), deadline)):
                    yield from self._write_staged(channel, number, at, part, deadline)
                    continue
                self._short = b"" if not number else self._short
                is_last = number * chunk_bytes + at + len(part) == end
                if not (is_last and self._store_later(channel, number, at, part, deadline)):
                    yield from self._store(channel, number, at, part, deadline)
            self._check()
            self.length = max(self.length, end)
            self.mtime_ns = self.ctime_ns = wall_ns(channel)
        finally:
            self._end_change(change)
            self._lock.release()

    def read(self, channel: IoChannel, offset: int, into: memoryview) -> Steps[int]:
        """What the file holds so far; holes are zeros."""
        deadline = channel.now() + self.volume.timing.write_deadline
        yield from self._take(channel, deadline)
        try:
            self._check()
            self._keep_rest(channel)
            count = max(0, min(len(into), self.length - offset))
            for number, at, part in pieces(offset, into[:count], self._chunk_bytes):
                yield from self._until_quiet(channel, deadline, number)
                if number in self._growing:
                    yield from self._end_growing(channel, number, deadline)
                yield from self._read_chunk(channel, number, at, part, deadline)
            return count
        finally:
            self._lock.release()

    def resize(self, channel: IoChannel, length: int) -> Steps[None]:
        """ftruncate(2): cut it, or lengthen it by a hole."""
        deadline = channel.now() + self.volume.timing.write_deadline
        yield from self._take(channel, deadline)
        change = self._begin_change()
        try:
            self._check()
            self._check_room(length)
            self.gaps.is_bare = False
            if length == self.length:
                return
            self._go_on()
            yield from self._until_quiet(channel, deadline)
            if length < self.length:
                yield from self._cut(channel, length, deadline)
            elif self.length % self._chunk_bytes:
                self.gaps.add(self.length // self._chunk_bytes)
            self.length = length
            self.mtime_ns = self.ctime_ns = wall_ns(channel)
        finally:
            self._end_change(change)
            self._lock.release()

    def change(self, channel: IoChannel, changes: SetAttributes) -> Steps[None]:
        """Mode, owner and times, which are published with the file."""
        yield from self._take(channel, channel.now() + self.volume.timing.write_deadline)
        try:
            now_ns = wall_ns(channel)
            self.mode = self.mode if changes.mode is None else changes.mode
            self.uid = self.uid if changes.uid is None else changes.uid
            self.gid = self.gid if changes.gid is None else changes.gid
            self.atime_ns = time_told(self.atime_ns, changes.atime_ns, changes.touch_atime, now_ns)
            self.mtime_ns = time_told(self.mtime_ns, changes.mtime_ns, changes.touch_mtime, now_ns)
            self.ctime_ns = now_ns
        finally:
            self._lock.release()

    def move(
        self, channel: IoChannel, path: bytes, replaced: Manifest | None, *, is_moved: bool
    ) -> Steps[None]:
        """Give the file another name. `replaced`: what is behind it. `is_moved`: that was behind the old."""
        yield from self._take(channel, channel.now() + self.volume.timing.write_deadline)
        self.path, self._replaced = path, replaced
        if not is_moved and replaced is not None:
            self._over.append(replaced.identity)
        self._lock.release()

    def told(self, before: Manifest | None, now: Manifest | None) -> None:
        """Note what the name leads to, which goes with the close; with `before`, if that led there."""
        if before is None or (self._replaced is not None and self._replaced.identity == before.identity):
            self._replaced = now

    def unlink(self, channel: IoChannel) -> Steps[Manifest | None]:
        """Have the file never published from now on. Returns what was published by then, if anything."""
        yield from self._take(channel, channel.now() + self.volume.timing.write_deadline)
        self.unlinked = True
        self._lock.release()
        return self.manifest

    def has_failed(self) -> bool:
        return self._failed != 0

    def sync(self, channel: IoChannel) -> Steps[None]:
        """fsync(2): nothing that was acknowledged so far has failed, chunks under way included. The file is
        stored by its close."""
        deadline = channel.now() + self.volume.timing.write_deadline
        yield from self._take(channel, deadline)
        try:
            yield from self._until_quiet(channel, deadline)
            self._check()
        finally:
            self._lock.release()

    def close(self, channel: IoChannel, holder: LockOwner) -> Steps[None]:
        """A descriptor was closed (FLUSH). Raises FsError where the file should be there and is not."""
        deadline = channel.now() + self.volume.timing.write_deadline
        yield from self._take(channel, deadline)
        try:
            self._check()
            closed = self.users.close(holder, split(self.path)[1])
            # A process of a guest that has written nothing is known by nothing.
            alone = closed is Closed.NOT_YET and holder.pid <= 0 and not self.users.wrote
            if closed is Closed.DYING:
                self._fail(errno.EIO)
            elif self.changed and (closed in (Closed.WHOLE, Closed.UNTOLD) or alone):
                yield from self._publish(channel, deadline)
        finally:
            self._lock.release()

    def end(self, channel: IoChannel) -> Steps[None]:
        """Nobody has it open any more (RELEASE)."""
        yield from self._take_again(channel)  # however long it takes: nobody comes back for what is staged
        try:
            deadline = channel.now() + self.volume.timing.write_deadline
            while (busy := self._publishing) is not None:
                yield from self._wait_for(channel, busy, deadline)
                deadline = channel.now() + self.volume.timing.write_deadline
            if self.opens or self._failed or not self.changed:
                return  # opened by somebody meanwhile, or nothing is to be published
            if self.users.unclosed:
                self._fail(errno.EIO)
                return
            with contextlib.suppress(FsError):  # nobody hears of it; the file is not there
                yield from self._publish(channel, deadline)
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """Nobody has it open, nor will: not before that is certain. What is in no manifest goes."""
        if self.changed:
            self._fail(self._failed or errno.EIO)
        self._let_go()
        self._held.let_go()
        self.built_on.end()

    def publish(self, channel: IoChannel) -> Steps[None]:
        """Make it visible as it is. Raises FsError."""
        deadline = channel.now() + self.volume.timing.write_deadline
        yield from self._take(channel, deadline)
        try:
            self._check()
            if self.changed:
                yield from self._publish(channel, deadline)
        finally:
            self._lock.release()

    # -- the manifest -----------------------------------------------------------------------------------

    def _publish(self, channel: IoChannel, deadline: float) -> Steps[None]:
        """Publish the content, which does not change meanwhile."""
        self._publishing = publishing = threading.Lock()
        publishing.acquire()
        try:
            while self._changing:
                busy = next(iter(self._changing.values()))
                if not (yield from self._wait_for(channel, busy, deadline)):
                    raise FsError(errno.EIO, NO_END)
            self._check()
            yield from self._store_all(channel, deadline)
        finally:
            self._publishing = None
            publishing.release()

    def _store_all(self, channel: IoChannel, deadline: float) -> Steps[None]:
        """Store what is staged, then the manifest, with the lock held."""
        yield from self._until_quiet(channel, deadline)
        if self.unlinked:
            self._discards.add(self.volume, self._new_chunks())
            self._let_go()
            self.changed = False
            return
        content = self._short_content()
        if content is None:
            yield from self._store_rest(channel, deadline)
            channel.waits_for_slow()  # a program takes an error of its close for the loss of its file
            yield from self._ask(channel)
        manifest = self._manifest(content)
        if len(manifest.runs) > self.volume.runs_max:
            raise self._fail(errno.EFBIG, "the file was written over in too many places")
        names, look, self._look, earlier = self.volume.names, self._look, None, self._replaced
        if look is not None:
            # Nothing is read beside it, and other files of these directories do not wait for it.
            yield from self._name(channel, deadline)
        naming = self._name(channel, deadline) if self._unnamed else None
        only_over = self.gaps.only_over(manifest, self._stored, self._over)
        key, raw, began = path_key(self.path), manifest.encode(), channel.now()
        try:
            had_value = yield from names.replace(channel, key, raw, deadline, naming, look, only_over)
        except (PutRefused, BadPut) as refused:
            if self.gaps.is_bare and isinstance(refused, ReplacedMeanwhile):
                self.changed = False  # the file is there, which is all that was asked for
                return
            number = errno_of(refused) if isinstance(refused, PutRefused) else errno.EIO
            raise self._fail(number, str(refused)) from None
        own, is_judged = set(self._new_chunks()), only_over is not None and not self.gaps.is_bare
        if is_judged and not (yield from stays(channel, self.volume, manifest, own, began)):
            raise self._fail(errno.ESTALE, "another host stored the file at the same time")
        # With no value there another agent has renamed it, and its chunks with it.
        gone, self._replaced = self._replaced if had_value else None, manifest
        self.manifest, self.changed, self._over = manifest, False, [manifest.identity]
        self.built_on.go_on(manifest)
        if gone is not None and (gone is earlier or (yield from is_newest(channel, self.volume, manifest))):
            self._discards.replaced(self.volume, gone, manifest)
        self._published(self)

    def _short_content(self) -> bytes | None:
        """The bytes of a file that its manifest has room for."""
        if self.length > self.volume.room or self._stored or any(self._staged) or not self.length:
            return None
        if self._base is not None and self._base_chunks:
            return None
        chunk = self._staged.get(0)
        self.gaps.kept(chunk, self._short, self.length)
        content = self._short if chunk is None else bytes(memoryview(chunk.buffer)[: self.length])
        return content.ljust(self.length, b"\0")

    def _store_rest(self, channel: IoChannel, deadline: float) -> Steps[None]:
        while self._growing:
            number = min(self._growing)
            yield from self._until_quiet(channel, deadline, number)  # a read may end it, too
            if number in self._growing:
                yield from self._end_growing(channel, number, deadline, is_end=True)
        if self._short:
            yield from self._stage(channel, 0, deadline)
        for number in sorted(self._staged):
            size = min(self._chunk_bytes, self.length - number * self._chunk_bytes)
            if size > 0:
                yield from self._store_staged(channel, number, self._staged[number], size, deadline)
            else:
                self._unstage(number)
        # The end moved after the last chunk was stored, or the file was lengthened behind it.
        for number in self._of_wrong_size():
            chunk = yield from self._stage(channel, number, deadline)
            size = min(self._chunk_bytes, self.length - number * self._chunk_bytes)
            yield from self._store_staged(channel, number, chunk, size, deadline)

    def _of_wrong_size(self) -> list[int]:
        chunk_bytes, stored = self._chunk_bytes, self._stored.items()
        last = -(-self.length // chunk_bytes) - 1
        suspects = {last, *(number for number, (_, size) in stored if size != chunk_bytes)}
        if self._base is not None and self._base_chunks:
            suspects.add(self._base_chunks - 1)
        return sorted(number for number in suspects if 0 <= number <= last and self._is_wrong(number))

    def _is_wrong(self, number: int) -> bool:
        origin, size = self._origin(number)
        return origin != HOLE and size != min(self._chunk_bytes, self.length - number * self._chunk_bytes)

    def _ask(self, channel: IoChannel) -> Steps[None]:
        """Ask whether the chunks are still there, where that is not known. What it has stored and holds is
        there for a single agent. Those that no directory names yet are, or will be refused."""
        chunks, keys = self.volume.chunks, []
        is_held = self._base is None and not (self._is_crowded or chunks.settings.ttl_seconds)
        if is_held and not self._is_old(channel, 0):
            return
        for number in range(-(-self.length // self._chunk_bytes)):
            origin, _ = self._origin(number)
            if origin != HOLE and number not in self._unnamed:
                keys.append(chunk_key(origin, number))
        if not keys or (chunks.are_named(channel, keys) and not self._is_old(channel, len(keys))):
            return
        held = yield from hold_all(channel, self.volume, keys, self.holder)
        if isinstance(held, MissCause):
            why = why_not_whole(held, is_crowded=self._is_crowded)
            raise self._fail(why.errno, str(why))
        let_go(held)

    def _is_old(self, channel: IoChannel, chunks: int) -> bool:
        """Whether other agents may have evicted chunks of it, of which there are so many."""
        if self.volume.timing.directory_fresh:
            return False
        since = channel.now() if self._first_at is None else self._first_at
        has_others = chunks > len(self._stored) - len(self._unnamed)
        return has_others or channel.now() - since >= ASKED_SECONDS

    def _manifest(self, content: bytes | None) -> Manifest:
        identity = self._origins.identity
        chunks = range(-(-self.length // self._chunk_bytes))
        runs = runs_of(identity, (self._origin(number)[0] for number in chunks))
        return Manifest(
            Kind.FILE, self.path, self.mode, self.uid, self.gid, self.atime_ns, self.mtime_ns, self.ctime_ns,
            identity, self.length, self._chunk_bytes,
            () if content is not None else tuple(runs), content,
        )  # fmt: skip
