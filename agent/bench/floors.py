"""The floors: what the parts of the path can do alone, on the same machine and in the same run."""

import itertools
import os
import secrets
import socket
from collections.abc import Iterable, Iterator

from agent.bench.contents import Contents, pages
from agent.bench.raw_tcp_server import ASK, BEGIN
from agent.bench.rounds import Sample, rate, together
from agent.bench.sites import IN_FLIGHT, MEMORY_FILE_BYTES, Sites
from agent.errors import G35Error
from agent.inline.cipher_suites import SALT_BYTES, SUITES, Place
from agent.inline.scatter import Buffer
from agent.inline.secrets import SecretKey
from nvmeof.transport.socket_options import set_options


class RawTcpProbe:
    """One stream; the client keeps a few requests in flight and receives into one buffer."""

    def __init__(self, sites: Sites, value_bytes: int) -> None:
        self._sites = sites
        self._value_bytes = value_bytes
        self._buffer = pages(value_bytes)

    def prepare(self) -> None:
        with self._connected() as connection:
            self._receive(connection)
        if self._buffer != Contents(self._value_bytes).value(0):
            raise G35Error("the raw TCP server sent something else than its block")

    def round(self, seconds: float) -> Sample:
        with self._connected() as connection:
            request = ASK.pack(1)

            def turn() -> int:
                self._receive(connection)
                connection.sendall(request)
                return self._value_bytes

            timed = together([turn], seconds)
            for _ in range(IN_FLIGHT):  # those still under way, outside the time
                self._receive(connection)
        return rate(timed)

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self._sites.raw_tcp_port), timeout=30)
        set_options(connection)
        connection.settimeout(None)  # a socket with a time-out polls before every call
        connection.sendall(BEGIN.pack(self._value_bytes, self._value_bytes, False) + ASK.pack(1) * IN_FLIGHT)
        return connection

    def _receive(self, connection: socket.socket) -> None:
        got = connection.recv_into(self._buffer, self._value_bytes, socket.MSG_WAITALL)
        if got != self._value_bytes:
            raise G35Error(f"the raw TCP server sent {got} of {self._value_bytes} bytes")


class FuseMemoryProbe:
    """Four threads that read one file through our door. The bytes of the file lie ready in memory."""

    def __init__(self, sites: Sites, value_bytes: int) -> None:
        self._sites = sites
        self._value_bytes = value_bytes
        self._buffers = [pages(value_bytes) for _ in range(IN_FLIGHT)]

    def prepare(self) -> None:
        content = Contents(MEMORY_FILE_BYTES).value(0)
        descriptor = os.open(self._sites.memory_file, os.O_RDONLY)
        try:
            buffer = self._buffers[0]
            for offset in range(0, MEMORY_FILE_BYTES, self._value_bytes):
                os.preadv(descriptor, [buffer], offset)
                if buffer != content[offset : offset + self._value_bytes]:
                    raise G35Error(f"the mount from memory served wrong bytes at {offset}")
        finally:
            os.close(descriptor)

    def round(self, seconds: float) -> Sample:
        descriptor = os.open(self._sites.memory_file, os.O_RDONLY)
        try:
            share = MEMORY_FILE_BYTES // self._value_bytes // IN_FLIGHT
            parts = [range(number * share, (number + 1) * share) for number in range(IN_FLIGHT)]
            turns = map(file_reads, itertools.repeat(descriptor), parts, self._buffers)
            return rate(together([turn.__next__ for turn in turns], seconds))
        finally:
            os.close(descriptor)


def file_reads(descriptor: int, numbers: Iterable[int], buffer: memoryview) -> Iterator[int]:
    """Reads of these pieces of a file, round and round; a piece is as long as the buffer."""
    size = len(buffer)
    for number in itertools.cycle(numbers):
        got = os.preadv(descriptor, [buffer], number * size)
        if got != size:
            raise G35Error(f"a read of the file brought {got} of {size} bytes")
        yield got


class AesProbe:
    """Opening a value in units of 256 KiB by the suite that the agent uses, on one core."""

    UNIT_BYTES = 256 << 10

    def __init__(self, value_bytes: int) -> None:
        self._plain = Contents(value_bytes).value(0)
        self._sealed = pages(value_bytes)
        self._opened = pages(value_bytes)
        self._bound = secrets.token_bytes(64)
        self._salt = secrets.token_bytes(SALT_BYTES)
        self._place = Place(bytes(16), 0)
        self._suite = SUITES["aes-256-gcm"](SecretKey(secrets.token_bytes(64)))
        self._proofs: list[bytes] = []

    def prepare(self) -> None:
        cipher = self._suite.slot(self._salt, self._place)
        self._proofs = [
            cipher.seal_unit(number, plain, sealed, self._bound)
            for number, (plain, sealed) in enumerate(
                zip(self._units(self._plain), self._units(self._sealed), strict=True)
            )
        ]
        self._turn()
        if self._opened != self._plain:
            raise G35Error("what was sealed did not open to what it was")

    def round(self, seconds: float) -> Sample:
        return rate(together([self._turn], seconds))

    def _units(self, value: memoryview) -> list[memoryview]:
        return [value[at : at + self.UNIT_BYTES] for at in range(0, len(value), self.UNIT_BYTES)]

    def _turn(self) -> int:
        cipher = self._suite.slot(self._salt, self._place)
        units: zip[tuple[Buffer, memoryview, bytes]] = zip(
            self._units(self._sealed), self._units(self._opened), self._proofs, strict=True
        )
        for number, (sealed, into, proof) in enumerate(units):
            if not cipher.open_unit(number, sealed, into, self._bound, proof):
                raise G35Error("a unit that was just sealed did not open")
        return len(self._opened)
