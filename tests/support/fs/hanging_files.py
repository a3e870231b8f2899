"""A FUSE mount with one file that answers nothing but what a test permits: what a stranger can hand over.

`refuse` names operations that are answered with EIO, `hold` those that are not answered before `let_go`.
The mount is made as the agent's is. A process that has the file open must not fork: the child closes a copy,
and the server may wait for the fork (strange_front_end.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import threading
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from agent.fs.doors.mounting import MountOptions, mount, unmount
from agent.fs.fuse.abi import Opcode
from tests.support.fs.fuse_records import InHeader, OutHeader

FILE = 2
_ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
_INIT = struct.Struct("=IIIIHHIIHHI28x")
_LONG = 1 << 20


class HangingFiles:
    """A context manager. `path` is the file."""

    def __init__(self, mountpoint: Path) -> None:
        self._mountpoint = mountpoint
        self.path = mountpoint / "file"
        self._hold: set[Opcode] = set()
        self._refuse: set[Opcode] = set()
        self._waiting: list[int] = []
        self._lock = threading.Lock()
        self._device = -1
        self._server = threading.Thread(target=self._serve, name="hanging-files", daemon=True)

    def __enter__(self) -> HangingFiles:
        self._mountpoint.mkdir()
        self._device = mount(self._mountpoint, MountOptions(allow_other=False))
        self._server.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.let_go()
        unmount(self._mountpoint, lazy=True, force=True)
        self._server.join(30)
        os.close(self._device)

    def hold(self, operations: Collection[Opcode]) -> None:
        """From now on these wait."""
        with self._lock:
            self._hold = set(operations)

    def refuse(self, operations: Collection[Opcode]) -> None:
        """From now on these fail."""
        self._refuse = set(operations)

    def let_go(self) -> None:
        """Answer what waits, and everything from now on."""
        with self._lock:
            self._hold = set()
            waiting, self._waiting = self._waiting, []
        for unique in waiting:
            self._answer(unique, error=errno.EINTR)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, _LONG)
            except OSError as error:
                if error.errno == errno.ENOENT:
                    continue  # it was interrupted before we read it
                return  # unmounted
            header = InHeader.decode_untrusted(request)
            opcode = Opcode(header.opcode)
            if opcode in (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT):
                continue
            with self._lock:
                if opcode in self._hold:
                    self._waiting.append(header.unique)
                    continue
            if opcode in self._refuse:
                self._answer(header.unique, error=errno.EIO)
            else:
                self._answer_well(opcode, header)

    def _answer_well(self, opcode: Opcode, header: InHeader) -> None:
        file = _ATTRIBUTES.pack(
            FILE, 1 << 20, 0, 0, 0, 0, 0, 0, 0, stat.S_IFREG | 0o666, 1, *_IDS, 0, 4096, 0
        )
        root = _ATTRIBUTES.pack(1, 0, 0, 0, 0, 0, 0, 0, 0, stat.S_IFDIR | 0o777, 2, *_IDS, 0, 4096, 0)
        match opcode:
            case Opcode.INIT:
                self._answer(header.unique, _INIT.pack(7, 31, 65536, 0, 16, 16, 65536, 1, 1, 0, 0))
            case Opcode.LOOKUP:
                self._answer(header.unique, struct.pack("=QQQQII", FILE, 0, 0, 0, 0, 0) + file)
            case Opcode.GETATTR:
                attributes = root if header.nodeid == 1 else file
                self._answer(header.unique, struct.pack("=QII", 0, 0, 0) + attributes)
            case Opcode.OPEN | Opcode.OPENDIR:
                self._answer(header.unique, struct.pack("=QII", 1, 0, 0))
            case Opcode.FLUSH | Opcode.RELEASE | Opcode.RELEASEDIR | Opcode.DESTROY:
                self._answer(header.unique)
            case _:
                self._answer(header.unique, error=errno.ENOSYS)

    def _answer(self, unique: int, body: bytes = b"", error: int = 0) -> None:
        body = b"" if error else body
        with contextlib.suppress(FileNotFoundError):  # whoever asked does not wait any more
            os.write(self._device, OutHeader(16 + len(body), -error, unique).encode() + body)


_IDS = (os.getuid(), os.getgid())
