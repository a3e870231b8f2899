"""host_shim's system calls through a virtio-fs device: `Files` of its control_session.py without any mount.

    pool = Pool("", files=VirtiofsFiles(machine))      # a machine that is started, and its client, too

`FuseClient` stands where a guest's kernel would. Buffers in the machine's memory are read and written in
place; any other goes by way of one that is borrowed for the call.
"""

import errno
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

from agent.bench.virtio_driver.guest_memory import Room
from agent.bench.virtio_driver.machine import Machine
from host_shim.session_files import Files, Refusal

TRANSFER_BYTES: Final = 1 << 20
"""The longest READ or WRITE, as the device agrees to it at INIT; longer calls are several requests."""
BORROWED_MAX: Final = 32
"""Buffers for calls with memory of their own, a transfer long each: more such calls at a time wait."""


def _refusal(error: OSError) -> Refusal:
    return Refusal(error.errno, error.strerror)


class VirtiofsFiles(Files):
    """Open files by number, as a process has them. Any thread of the process that made it: a child of a fork
    shares the guest's memory with its parent, and would ask the device in its place."""

    def __init__(self, machine: Machine) -> None:
        self._memory, self._client = machine.memory, machine.client
        self._process_id = os.getpid()
        self._files: dict[int, tuple[int, int]] = {}
        self._numbers = itertools.count(1)
        self._spare: list[Room] = []
        self._may_borrow = threading.BoundedSemaphore(BORROWED_MAX)

    def processes(self, folder: str) -> list[str]:
        """None: which process serves a guest's request is the device's affair."""
        return []

    def open(self, path: str) -> int:
        """Look up every name of the path and open the file for reading and writing."""
        try:
            node = self._client.walk(path).number
            number = next(self._numbers)
            self._files[number] = (node, self._client.open(node, os.O_RDWR))
            return number
        except OSError as error:
            raise _refusal(error) from None

    def close(self, descriptor: int) -> None:
        """As close(2); in a child of a fork the file is forgotten, and stays open for the parent."""
        node, handle = self._files.pop(descriptor)
        if os.getpid() == self._process_id:
            try:
                self._client.release(node, handle)
            except OSError as error:
                raise _refusal(error) from None

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        """As preadv(2): fewer bytes than asked for at the end of the file."""
        try:
            return self._read(descriptor, into, offset)
        except OSError as error:
            raise _refusal(error) from None

    def _read(self, descriptor: int, into: memoryview, offset: int) -> int:
        address = self._memory.address_of(into)
        if address is None:
            return self._read_by_loan(descriptor, into, offset)
        node, handle = self._files[descriptor]
        client, size = self._client, len(into)
        if size <= TRANSFER_BYTES:
            return client.read_into(node, handle, offset, Room(address, into))
        done = 0
        while done < size:
            part = into[done : done + TRANSFER_BYTES]
            got = client.read_into(node, handle, offset + done, Room(address + done, part))
            done += got
            if got < len(part):
                break
        return done

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        try:
            return self._write(descriptor, memoryview(data), offset)
        except OSError as error:
            raise _refusal(error) from None

    def _write(self, descriptor: int, view: memoryview, offset: int) -> int:
        address = self._memory.address_of(view)
        if address is None:
            return self._write_by_loan(descriptor, view, offset)
        node, handle = self._files[descriptor]
        done = 0
        while done < len(view):
            part = view[done : done + TRANSFER_BYTES]
            taken = self._client.write_from(node, handle, offset + done, Room(address + done, part))
            done += taken
            if taken < len(part):
                break
        return done

    def preadv_parts(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        done = 0
        for part in parts:
            got = self.preadv(descriptor, part, offset + done)
            done += got
            if got < len(part):
                break
        return done

    def pwritev(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        return self.pwrite(descriptor, b"".join(parts), offset)

    def fgetxattr(self, descriptor: int, name: bytes, into: memoryview) -> int:
        """As fgetxattr(2), of a value of up to a transfer."""
        node, _ = self._files[descriptor]
        address = self._memory.address_of(into)
        try:
            if address is not None:
                return self._client.getxattr_into(node, name, Room(address, into))
            return self._by_loan(into, lambda part: self._client.getxattr_into(node, name, part))
        except OSError as error:
            raise _refusal(error) from None

    def ioctl(self, descriptor: int, command: int, data: bytearray) -> None:
        """Refused: a guest has no memory that the agent could map by a descriptor."""
        raise Refusal(errno.ENOTTY, os.strerror(errno.ENOTTY))

    def _read_by_loan(self, descriptor: int, into: memoryview, offset: int) -> int:
        node, handle = self._files[descriptor]
        got = self._by_loan(into, lambda part: self._client.read_into(node, handle, offset, part))
        if got < min(len(into), TRANSFER_BYTES) or got == len(into):
            return got
        return got + self.preadv(descriptor, into[got:], offset + got)

    def _by_loan(self, into: memoryview, ask: Callable[[Room], int]) -> int:
        """Have the device fill a transfer at the most of memory that it cannot reach; how many bytes came."""
        with self._may_borrow:
            room = self._borrow()
            try:
                part = room.part(0, min(len(into), TRANSFER_BYTES))
                got = ask(part)
                into[:got] = part.view[:got]
                return got
            finally:
                self._spare.append(room)

    def _write_by_loan(self, descriptor: int, data: memoryview, offset: int) -> int:
        node, handle = self._files[descriptor]
        with self._may_borrow:
            room = self._borrow()
            try:
                part = room.part(0, min(len(data), TRANSFER_BYTES))
                part.view[:] = data[: part.size]
                taken = self._client.write_from(node, handle, offset, part)
            finally:
                self._spare.append(room)
        if taken < part.size or taken == len(data):
            return taken
        return taken + self.pwrite(descriptor, data[taken:], offset + taken)

    def _borrow(self) -> Room:
        try:
            return self._spare.pop()
        except IndexError:
            return self._memory.room(TRANSFER_BYTES)
