"""The agent's end of control sessions, in memory: what host_shim is tested against without a mount.

It follows host_shim/control_wire.py and knows nothing of flash. Tests make it misbehave with `fail`,
`kill` and `cut_off`.
"""

from __future__ import annotations

import errno
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from host_shim.control_wire import (
    AT_ONCE_BYTES,
    FLAG_NO_ANSWER,
    REPORT_BYTES,
    Answer,
    MalformedControl,
    Operation,
    Outcome,
    PrefixReport,
    Request,
    decode_report_untrusted,
    decode_request_untrusted,
    decode_value_xattr_untrusted,
    ticket_at,
)
from host_shim.session_files import Files, Refusal


@dataclass(slots=True)
class _Ticket:
    volume: str
    key: bytes
    length: int | None
    ttl_seconds: int
    buffer: bytearray = field(default_factory=bytearray)
    outcome: Outcome = Outcome.UNKNOWN


@dataclass(slots=True)
class _OpenFile:
    generation: int
    answers: deque[bytes] = field(default_factory=deque)
    tickets: dict[int, _Ticket] = field(default_factory=dict)


class PlainFiles(Files):
    """Calls on several parts by those on one, and neither values by one request nor registered memory."""

    def processes(self, folder: str) -> list[str]:
        return []

    def pwritev(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        return self.pwrite(descriptor, b"".join(parts), offset)

    def preadv_parts(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        whole = memoryview(bytearray(sum(map(len, parts))))
        length = self.preadv(descriptor, whole, offset)
        at = 0
        for part in parts:
            piece = whole[at : min(length, at + len(part))]
            part[: len(piece)] = piece
            at += len(piece)
        return length

    def fgetxattr(self, descriptor: int, name: bytes, into: memoryview) -> int:
        raise Refusal(errno.EOPNOTSUPP, "no values by one request")

    def ioctl(self, descriptor: int, command: int, data: bytearray) -> None:
        raise Refusal(errno.ENOTTY, "no registered memory")


class ScriptedAgent(PlainFiles):
    """Implements `host_shim.control_session.Files` by answering as an agent would."""

    def __init__(self, volumes: tuple[str, ...] = ("kv",), slot_bytes: int = 1 << 20) -> None:
        self.values: dict[tuple[str, bytes], bytes] = {}
        self.causes: dict[bytes, Outcome] = {}
        self.expiries: dict[bytes, int] = {}
        self.prestaged: list[bytes] = []
        self.requests: list[Request] = []
        self.gate: dict[str, float] | None = None
        self.opens = 0
        self.reads = 0
        self.alive = True
        self.cut_off: int | None = None
        """Reads longer than this end here, as when a later part of a long read failed."""
        self.mangle: Callable[[bytes], bytes] | None = None
        """Changes answers on their way to the client."""
        self._volumes = volumes
        self._slot_bytes = slot_bytes
        self._generation = 0
        self._files: dict[int, _OpenFile] = {}
        self._lock = threading.Lock()
        self._fail_next: deque[int] = deque()

    def serve(self, volumes: tuple[str, ...]) -> None:
        """From now on these volumes, and no others."""
        self._volumes = volumes

    def fail(self, *errnos: int) -> None:
        """The next system calls fail with these."""
        self._fail_next.extend(errnos)

    def kill(self) -> None:
        """The agent dies; `restart` brings another, with the same values."""
        self.alive = False
        self._generation += 1

    def restart(self) -> None:
        self.alive = True

    def reports(self) -> list[PrefixReport]:
        """What connectors have reported of their requests."""
        whole = b"".join(
            key
            for request in list(self.requests)
            if request.operation is Operation.REPORT
            for key in request.keys
        )
        return [
            decode_report_untrusted(whole[at : at + REPORT_BYTES])
            for at in range(0, len(whole), REPORT_BYTES)
        ]

    @property
    def open_files(self) -> int:
        return len(self._files)

    def open(self, path: str) -> int:
        with self._lock:
            if not self.alive:
                raise Refusal(errno.ENOTCONN, "no agent")
            assert path.endswith("/.g35/session")
            self.opens += 1
            descriptor = 1000 + self.opens
            self._files[descriptor] = _OpenFile(self._generation)
            return descriptor

    def close(self, descriptor: int) -> None:
        with self._lock:
            del self._files[descriptor]

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        with self._lock:
            file = self._checked(descriptor)
            ticket, at = ticket_at(offset)
            if ticket < 0:
                self._request(file, bytes(data))
            else:
                self._write_value(file.tickets[ticket], bytes(data), at)
            return len(data)

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        with self._lock:
            file = self._checked(descriptor)
            self.reads += 1
            number, at = ticket_at(offset)
            if number < 0:
                data = file.answers.popleft()
                data = self.mangle(data) if self.mangle else data
            else:
                data = self._read_value(file.tickets[number])[at : at + len(into)]
                if self.cut_off is not None and len(data) > self.cut_off:
                    data = data[: self.cut_off]
                    file.tickets[number].outcome = Outcome.CORRUPT
            data = data[: len(into)]
            into[: len(data)] = data
            return len(data)

    def _checked(self, descriptor: int) -> _OpenFile:
        if self._fail_next:
            code = self._fail_next.popleft()
            raise Refusal(code, "scripted")
        file = self._files[descriptor]
        if not self.alive or file.generation != self._generation:
            raise Refusal(errno.ENOTCONN, "the agent of this file is gone")
        return file

    def _request(self, file: _OpenFile, data: bytes) -> None:
        try:
            request = decode_request_untrusted(data)
        except MalformedControl as malformed:
            raise Refusal(errno.EINVAL, str(malformed)) from None
        self.requests.append(request)
        if request.volume not in (*self._volumes, ""):
            if request.flags & FLAG_NO_ANSWER:
                raise Refusal(errno.ENOENT, "no such volume")
            self._answer(file, request, b"", errno.ENOENT)
            return
        lengths = request.lengths or (None,) * len(request.keys)
        if request.operation in (Operation.GET, Operation.PUT):
            for index, (key, length) in enumerate(zip(request.keys, lengths, strict=True)):
                if length is not None and length > self._slot_bytes:
                    raise Refusal(errno.EFBIG, "longer than a slot")
                file.tickets[request.first_ticket + index] = _Ticket(
                    request.volume, key, length, request.ttl_seconds
                )
        if not request.flags & FLAG_NO_ANSWER:
            self._answer(file, request, self._body(file, request), 0)

    def _body(self, file: _OpenFile, request: Request) -> bytes:
        match request.operation:
            case Operation.STATS:
                volumes = [
                    {
                        "name": name,
                        "value_bytes": self._slot_bytes,
                        "slots": 0,
                        **({"gate": self.gate} if self.gate else {}),
                    }
                    for name in self._volumes
                ]
                return json.dumps({"values": len(self.values), "volumes": volumes}).encode()
            case Operation.OUTCOME:
                first = request.first_ticket
                return bytes(file.tickets[first + index].outcome for index in range(len(request.keys)))
            case _:
                return bytes(self._one(request, key) for key in request.keys)

    def _one(self, request: Request, key: bytes) -> Outcome:
        place = (request.volume, key)
        if place not in self.values:
            return self.causes.get(key, Outcome.NEVER_STORED)
        if request.operation is Operation.DELETE:
            del self.values[place]
        if request.operation is Operation.PIN:
            self.expiries[key] = request.ttl_seconds
        if request.operation is Operation.PRESTAGE:
            self.prestaged.append(key)
            return Outcome.STARTED
        return Outcome.HIT

    def _read_value(self, ticket: _Ticket) -> bytes:
        value = self.values.get((ticket.volume, ticket.key))
        if value is None:
            ticket.outcome = self.causes.get(ticket.key, Outcome.NEVER_STORED)
            return b""
        if ticket.outcome is Outcome.UNKNOWN:
            ticket.outcome = Outcome.HIT
        return value

    def _write_value(self, ticket: _Ticket, data: bytes, at: int) -> None:
        assert ticket.length is not None
        assert at == len(ticket.buffer)
        ticket.buffer += data
        if len(ticket.buffer) == ticket.length:
            self.values[ticket.volume, ticket.key] = bytes(ticket.buffer)
            self.expiries[ticket.key] = ticket.ttl_seconds

    def _answer(self, file: _OpenFile, request: Request, body: bytes, code: int) -> None:
        file.answers.append(Answer(request.operation, request.request_id, code, body).encode())


class AgentThatGivesAtOnce(ScriptedAgent):
    """One with values by one request as well; `refuses` is the errno of one that has them no more."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = 0
        self.refuses = 0

    def fgetxattr(self, descriptor: int, name: bytes, into: memoryview) -> int:
        with self._lock:
            self._checked(descriptor)
            if self.refuses:
                raise Refusal(self.refuses, "scripted")
            self.at_once += 1
            volume, key = decode_value_xattr_untrusted(name)
            if volume not in self._volumes:
                raise Refusal(errno.ENOENT, "no such volume")
            value = self.values.get((volume, key))
            if value is None:
                raise Refusal(errno.ENODATA, "a miss")
            if len(value) > len(into):
                # So says Linux of a buffer that holds the longest attribute (do_getxattr, fs/xattr.c).
                raise Refusal(errno.E2BIG if len(into) >= AT_ONCE_BYTES else errno.ERANGE, "longer")
            into[: len(value)] = value
            return len(value)
