"""The other processes of an agent: readers, which serve gets, and write what is put, beside the
process that does everything.

Each has a mount of its own within the agent's, at `.g35/process-N`. This process mounts it and keeps it: a
reader that dies is started again without an unmount, and meanwhile requests to it fail at once
(agent/fs/doors/stand_in.py), so that clients ask here. reader.py is what runs there, reader_link.py what both
tell each other.

One thread does it all. It starts the processes itself, for the kernel kills them with the thread that did.
"""

import contextlib
import enum
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from agent.config.configuration import Configuration
from agent.errors import G35Error
from agent.fs.doors import mounting
from agent.fs.doors.mounting import MountOptions
from agent.fs.doors.stand_in import StandIn
from agent.host_os.worker_thread import OwnThread
from agent.http.counters import summed
from agent.pool.counters import Tally, total
from agent.pool.volume.uses import USES_MAX, Use
from agent.pool.volume.volume import PoolVolume
from agent.service.reader_link import Counts, Lines, LinkBroken, Order, Report, decode_report, encode_order
from agent.service.reader_silence import Silence
from agent.service.slot_lender import Borrower, SlotLender, link_pairs, links_of
from host_shim.control_wire import PROCESS_FOLDER

log = logging.getLogger(__name__)

START_SECONDS: Final = 60.0
"""From the start of a process to its first report; then it is started anew."""
AGAIN_SECONDS: Final = (0.1, 5.0)
"""From the end of a process to its next start: at first, and at the most."""
GOOD_SECONDS: Final = 30.0
"""After which the next start is as soon as the first."""
LAST_WORDS_SECONDS: Final = 0.5
"""For a process that has closed its link, to end by itself."""
LOOK_SECONDS: Final = 0.1
END_SECONDS: Final = 5.0


class S3ForReaders(Protocol):
    """The S3 door, as the readers need it (agent/s3/door.py)."""

    @property
    def addresses(self) -> list[str]:
        """Where it listens."""

    @property
    def links_of_reader(self) -> int:
        """Sockets between it and the door of each reader."""

    def serve_reader(self, links: Sequence[socket.socket], carrying: socket.socket) -> None:
        """A new process of a reader has the other ends."""


class GuestForReaders(Protocol):
    """The door of a guest, as the readers need it (agent/fs/virtiofs/door.py)."""

    def serve_reader(self, number: int, link: socket.socket) -> None:
        """A new process of this reader has the other end."""


class ReaderState(enum.Enum):
    STARTING = "starting"
    SERVING = "serving"
    LATE = "late"
    """It has told nothing for a second: it hangs, or the machine has no processor for it."""
    ENDED = "ended"
    """It is started again."""
    UNMOUNTED = "unmounted"
    """By somebody; it is left so until the agent starts again."""


LEGAL: Final = {
    ReaderState.ENDED: {ReaderState.STARTING, ReaderState.UNMOUNTED},
    ReaderState.STARTING: {ReaderState.SERVING, ReaderState.ENDED, ReaderState.UNMOUNTED},
    ReaderState.SERVING: {ReaderState.LATE, ReaderState.ENDED, ReaderState.UNMOUNTED},
    ReaderState.LATE: {ReaderState.SERVING, ReaderState.ENDED, ReaderState.UNMOUNTED},
    ReaderState.UNMOUNTED: set[ReaderState](),
}


def folder_of(mount: Path, number: int) -> Path:
    """Where a reader of an agent is mounted."""
    return mount / ".g35" / f"{PROCESS_FOLDER}{number}"


class _Told(NamedTuple):
    """What a reader has counted: its earlier processes, and the one that is there. Any thread may read it; it
    is replaced whole."""

    earlier: Counts
    now: Counts
    moved_earlier: int = 0
    moved_now: int = 0
    s3_earlier: Mapping[str, Any] = MappingProxyType({})
    s3_now: Mapping[str, Any] = MappingProxyType({})
    guests_earlier: Mapping[str, Any] = MappingProxyType({})
    guests_now: Mapping[str, Any] = MappingProxyType({})

    def counts(self) -> Counts:
        names = {*self.earlier, *self.now}
        return {
            name: total(each[name] for each in (self.earlier, self.now) if name in each) for name in names
        }


class _Reader:
    """One of them, over all of its processes. For the thread `readers`; others read what is said to be so."""

    def __init__(self, number: int, folder: Path | None) -> None:
        """`folder`: where it is mounted, if the agent has a mount."""
        self.number, self.folder = number, folder
        self.state = ReaderState.ENDED
        self.starts = 0
        self.told = _Told({}, {})
        self.process: subprocess.Popen[bytes] | None = None
        self.stand_in: StandIn | None = None
        self.link: socket.socket | None = None
        self.borrower = Borrower()
        """Of the process that is there, or was."""
        self.lines = Lines()
        self.silence = Silence(0, 0.0)
        self.since = self.again_at = 0.0
        self.pause = AGAIN_SECONDS[0]

    def become(self, state: ReaderState) -> None:
        if state not in LEGAL[self.state]:
            raise AssertionError(f"{state} after {self.state}")
        self.state = state

    def count(self, report: Report) -> None:
        self.told = self.told._replace(
            now=report.tallies, moved_now=report.moved, s3_now=report.s3, guests_now=report.guests
        )

    def take(self, report: Report, now: float) -> None:
        self.count(report)
        self.silence.end(now)
        if report.is_ready and self.state in (ReaderState.STARTING, ReaderState.LATE):
            self.become(ReaderState.SERVING)

    def forget_process(self) -> None:
        """It has ended: what it counted is kept."""
        told = self.told
        # Connections are those that there are: none of it.
        s3 = {name: value for name, value in told.s3_now.items() if name != "connections"}
        self.told = _Told(
            told.counts(), {}, told.moved_earlier + told.moved_now, 0, summed([told.s3_earlier, s3]),
            guests_earlier=summed([told.guests_earlier, told.guests_now]),
        )  # fmt: skip
        self.lines = Lines()
        if self.link is not None:
            self.link.close()
            self.link = None
        self.process = None
        self.borrower.has_ended()


class Readers(OwnThread):
    """All readers of an agent."""

    def __init__(self, configuration: Configuration, versions: int) -> None:
        """`versions`: the descriptor of agent/pool/volume/set_versions.py; it is this object's now."""
        super().__init__("readers", None, "")
        mount = configuration.agent.mount
        self._configuration, self._versions = configuration, versions
        self._count = configuration.agent.process_count
        self._readers = [
            _Reader(number, None if mount is None else folder_of(mount, number))
            for number in range(1, self._count)
        ]
        self._uses: list[Use] = []
        self._using = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._volumes: Sequence[PoolVolume] = ()
        self._lender: SlotLender | None = None
        self._s3: S3ForReaders | None = None
        self._guests: Sequence[GuestForReaders] = ()

    def serve_volumes(self, volumes: Sequence[PoolVolume]) -> None:
        """Have the readers serve these, and none that come to the pool later; before they start."""
        self._volumes = volumes

    def lend_by(self, lender: SlotLender) -> None:
        """Have slots lent to the readers; before they start."""
        self._lender = lender

    def serve_s3_with(self, door: S3ForReaders) -> None:
        """Have the readers serve reads of objects, at the addresses of this door; before they start, and when
        the door is open."""
        self._s3 = door

    def serve_guests_with(self, doors: Sequence[GuestForReaders]) -> None:
        """Have the readers serve queues of guests: all of them, in their order. Before they start."""
        self._guests = doors

    def guest_counts(self) -> dict[str, Mapping[str, int]]:
        """What all readers have moved for guests, as of a door, by the number of the device."""
        return summed(
            each for reader in self._readers for each in (reader.told.guests_earlier, reader.told.guests_now)
        )

    def s3_counts(self) -> dict[str, Any]:
        """What the S3 doors of all readers have counted, as `DoorCounters.snapshot` has it."""
        return summed(
            each for reader in self._readers for each in (reader.told.s3_earlier, reader.told.s3_now)
        )

    def tallies(self) -> Iterator[Mapping[str, Tally]]:
        """The counters of all readers, those that have ended too."""
        for reader in self._readers:
            yield reader.told.counts()

    def moved(self) -> dict[str, dict[str, int]]:
        """By folder, what the mount has moved, as of a door."""
        return {
            reader.folder.name: {
                "bytes_read": (moved := reader.told.moved_earlier + reader.told.moved_now),
                "bytes_written": 0,
                "bytes_copied": moved,
            }
            for reader in self._readers
            if reader.folder is not None
        }

    def take_uses(self) -> Sequence[Use]:
        """Uses that readers have told of since the last call."""
        with self._using:
            taken, self._uses = self._uses, []
        return taken

    def status(self) -> list[dict[str, Any]]:
        """A row for each reader: number, state, process id, starts, and counts of gets."""
        rows = []
        for reader in self._readers:
            process = reader.process
            counted = total(each for name, each in reader.told.counts().items() if name)
            rows.append(
                {
                    "number": reader.number,
                    "state": reader.state.value,
                    "pid": process.pid if process is not None else None,
                    "starts": reader.starts,
                    "gets": counted.gets_hit + counted.gets_missed,
                    "hits": counted.gets_hit,
                    "bytes_read": counted.bytes_read,
                }
            )
        return rows

    def _work(self) -> None:
        try:
            for reader in self._readers:
                self._mount(reader)
            while not self.stopping.is_set():
                self._turn(time.monotonic())
        except Exception:
            log.exception("the other processes of this agent are not served any more")
        finally:
            self._end()

    def _mount(self, reader: _Reader) -> None:
        if reader.folder is None:
            return
        settings = self._configuration.agent
        options = MountOptions(allow_other=settings.allow_other or None, subtype=mounting.PROCESS_SUBTYPE)
        try:
            reader.stand_in = StandIn(mounting.mount(reader.folder, options))
        except G35Error as error:
            log.error("process %d of this agent is not served: %s", reader.number, error)
            reader.become(ReaderState.UNMOUNTED)
            return
        self._selector.register(reader.stand_in.descriptor, selectors.EVENT_READ, reader)

    def _turn(self, now: float) -> None:
        for reader in self._readers:
            self._look(reader, now)
        for key, _ in self._selector.select(LOOK_SECONDS):
            reader = key.data
            if reader.link is not None and key.fd == reader.link.fileno():
                self._hear(reader)
            else:
                self._answer(reader)

    def _look(self, reader: _Reader, now: float) -> None:
        """Start what is to be started, and end what hangs."""
        if reader.state is ReaderState.UNMOUNTED:
            return
        process, stand_in = reader.process, reader.stand_in
        if process is None:
            if now >= reader.again_at and (stand_in is None or stand_in.negotiated is not None):
                self._start(reader, now)
            return
        silence, is_starting = reader.silence, reader.state is ReaderState.STARTING
        silence.look(now, is_starting=is_starting)
        if reader.state is ReaderState.SERVING and silence.is_late:
            reader.become(ReaderState.LATE)
        hangs = silence.seconds > START_SECONDS if is_starting else silence.hangs
        if hangs and process.poll() is None:
            log.error(
                "process %d of this agent (%d) hangs: nothing of it was heard for %.0f s; it is started anew",
                reader.number, process.pid, silence.seconds,
            )  # fmt: skip
            process.kill()
            process.wait()
        elif process.poll() is None and reader.borrower.is_to_end.is_set():
            # A slot that is lent to it is nobody's until it has ended.
            log.error(
                "process %d of this agent (%d) has not told in time of slots that were lent to it",
                reader.number, process.pid,
            )  # fmt: skip
            process.kill()
            process.wait()
        if process.returncode is not None:
            self._ended(reader, now)

    def _start(self, reader: _Reader, now: float) -> None:
        stand_in = reader.stand_in
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        lending, borrowing = link_pairs(links_of(self._configuration))
        answering, asking = link_pairs(0 if self._s3 is None else self._s3.links_of_reader)
        giving, taking = link_pairs(len(self._guests))
        with contextlib.ExitStack() as theirs_all:
            for each in (theirs, *borrowing, *asking, *taking):
                theirs_all.enter_context(each)
            slots, s3, guests = ([each.fileno() for each in some] for some in (borrowing, asking, taking))
            given = {
                "link": theirs.fileno(),
                "fuse": -1 if stand_in is None else stand_in.descriptor,
                "versions": self._versions,
                "parent": os.getpid(),
                "log-level": logging.getLogger().getEffectiveLevel(),
            }
            arguments = [f"--{name}={value}" for name, value in given.items()]
            lists = {"slots": slots, "s3": s3, "guests": guests}
            arguments += [f"--{name}={','.join(map(str, some))}" for name, some in lists.items()]
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "agent.cli.reader_process", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[
                        each
                        for each in (given["link"], given["fuse"], given["versions"], *slots, *s3, *guests)
                        if each >= 0
                    ],
                )
            except OSError as error:
                log.error("process %d of this agent cannot be started: %s", reader.number, error)
                for each in (ours, *lending, *answering, *giving):
                    each.close()
                reader.again_at = now + AGAIN_SECONDS[1]
                return
        reader.process, reader.link, reader.borrower = process, ours, Borrower()
        if self._lender is not None:
            self._lender.begin(reader.number, lending, reader.borrower)
        if self._s3 is not None:
            self._s3.serve_reader(answering[:-1], answering[-1])
        for door, link in zip(self._guests, giving, strict=True):
            door.serve_reader(reader.number, link)
        reader.since, reader.silence = now, Silence(process.pid, now)
        reader.starts += 1
        reader.become(ReaderState.STARTING)
        configuration = self._configuration.model_dump_json()
        listen = () if self._s3 is None else tuple(self._s3.addresses)
        folder, agreed = "", None
        if stand_in is not None:
            folder, agreed = str(reader.folder), stand_in.negotiated
        volumes = [each.settings.volume_id.hex() for each in self._volumes if not each.erased]
        order = Order(reader.number, self._count, configuration, folder, agreed, listen, volumes)
        with contextlib.suppress(OSError):  # it has ended, and `_look` sees that
            ours.sendall(encode_order(order))
        ours.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, reader)

    def _ended(self, reader: _Reader, now: float) -> None:
        """Its process is gone."""
        process = reader.process
        assert process is not None
        self._hear_rest(reader)
        if reader.link is not None:
            self._selector.unregister(reader.link)
        was_serving = reader.state in (ReaderState.SERVING, ReaderState.LATE)
        reader.forget_process()
        if reader.folder is not None and not mounting.is_mounted(reader.folder):
            log.warning("process %d of this agent was unmounted: its gets are served here", reader.number)
            reader.become(ReaderState.UNMOUNTED)
            self._close_mount(reader)
            return
        reader.become(ReaderState.ENDED)
        lasted = now - reader.since
        reader.pause = AGAIN_SECONDS[0] if lasted > GOOD_SECONDS else min(2 * reader.pause, AGAIN_SECONDS[1])
        reader.again_at = now + reader.pause
        log.warning(
            "process %d of this agent (%d) has ended, by %d; it is started again", reader.number, process.pid,
            process.returncode,
        )  # fmt: skip
        if was_serving and reader.stand_in is not None:
            self._selector.register(reader.stand_in.descriptor, selectors.EVENT_READ, reader)

    def _hear(self, reader: _Reader) -> None:
        """What a process says. That it is gone, `_look` finds."""
        assert reader.link is not None
        try:
            for line in reader.lines.receive(reader.link):
                was_starting = reader.state is ReaderState.STARTING
                report = decode_report(line)
                reader.take(report, time.monotonic())
                self._note_uses(report.uses)
                is_new = reader.state is ReaderState.SERVING and was_starting
                if is_new and reader.stand_in is not None:
                    self._selector.unregister(reader.stand_in.descriptor)
        except BlockingIOError:
            return
        except LinkBroken:
            if reader.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):  # it may have to say why it ends
                    reader.process.wait(LAST_WORDS_SECONDS)
                reader.process.kill()
                reader.process.wait()

    def _hear_rest(self, reader: _Reader) -> None:
        """What it had said before it ended."""
        try:
            while reader.link is not None:
                for line in reader.lines.receive(reader.link):
                    report = decode_report(line)
                    reader.count(report)
                    self._note_uses(report.uses)
        except (BlockingIOError, LinkBroken):
            return

    def _note_uses(self, uses: Sequence[Use]) -> None:
        with self._using:
            if len(self._uses) < USES_MAX * self._count:
                self._uses += uses

    def _answer(self, reader: _Reader) -> None:
        assert reader.stand_in is not None
        try:
            reader.stand_in.answer_waiting()
        except OSError:
            if reader.process is not None:
                return  # it ends by that, too
            reader.become(ReaderState.UNMOUNTED)
            self._selector.unregister(reader.stand_in.descriptor)
            self._close_mount(reader)

    def _close_mount(self, reader: _Reader) -> None:
        if reader.stand_in is not None:
            os.close(reader.stand_in.descriptor)
            reader.stand_in = None

    def _end(self) -> None:
        """Take the mounts away, and end the processes."""
        for reader in self._readers:
            if reader.folder is not None and reader.stand_in and mounting.is_mounted(reader.folder):
                if mounting.may_mount():
                    mounting.unmount(reader.folder, force=True)
                mounting.unmount(reader.folder, lazy=True)
            if reader.link is not None:
                reader.link.close()
        until = time.monotonic() + END_SECONDS
        for reader in self._readers:
            if reader.process is not None:
                try:
                    reader.process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    reader.process.kill()
                    reader.process.wait()
                reader.forget_process()
            self._close_mount(reader)
        self._selector.close()
        os.close(self._versions)
