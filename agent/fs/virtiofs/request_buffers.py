"""A chain of guest memory as one FUSE request: what is copied, what is not, and where the answer goes.

    readable   fuse_in_header, arguments [, the data of a WRITE]
    writable   fuse_out_header [, what READ, READDIR and the others answer]

Header and arguments are copied into memory of our own first: the guest can change its memory, and what was
checked must be what is used. The data of a WRITE stay in the guest's memory if they lie in one run; else they
are gathered. A READ opens into the guest's memory: into one run, or run by run (`Scatter`) where the runs are
not too short; a file of /fs needs one run and otherwise is copied. Copied bytes are counted.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

from agent.fs.fuse.abi import IN_HEADER, IN_HEADER_BYTES, OUT_HEADER, OUT_HEADER_BYTES, Opcode
from agent.fs.fuse.requests import WRITE_HEAD_BYTES
from agent.fs.fuse.session import Reply
from agent.host_os.payload_memory import payload_memory
from agent.inline.scatter import Scatter, Target

ARGUMENTS_BYTES_MAX: Final = 128 << 10
"""Header and arguments of anything but a WRITE; an extended attribute's value is the longest (64 KiB)."""
DIRECT_RUN_BYTES_LEAST: Final = 8 << 10
"""Runs that are shorter on the average are opened aside and copied. Measured, 1 MiB of AES-256-GCM: opened
run by run 198 us at 4 KiB, 152 at 8 KiB, 131 at 16 KiB; opened aside and copied 166, 147, 140."""

GuestRequest: TypeAlias = tuple[memoryview, int, memoryview, Target]
"""What `FuseSession.answer` is given: message, bytes received, data, room."""

_HEADER: Final = IN_HEADER
_NO_RUNS: Final[list[memoryview]] = []
_WRITE: Final[int] = Opcode.WRITE.value
_READ: Final[int] = Opcode.READ.value


class RequestBuffers:
    """One worker's. A request's views are good until the next `take`."""

    def __init__(self, transfer_bytes: int, scatters: Callable[[int], bool]) -> None:
        """`scatters` says of a node whether READ of it opens into a `Scatter`."""
        self._scatters = scatters
        self._message = payload_memory(ARGUMENTS_BYTES_MAX)
        self._data = payload_memory(transfer_bytes)
        self._room = payload_memory(transfer_bytes)
        self._header_runs = self._body_runs = _NO_RUNS
        self._body_bytes = 0
        self._in_place: object = None
        self.bytes_copied = 0

    def take(self, readable: list[memoryview], writable: list[memoryview]) -> GuestRequest:
        """The request in a chain. What is wrong with it `FuseSession` finds, from the lengths given here."""
        received = sum(map(len, readable))
        head = self._gather(self._message, readable, min(received, WRITE_HEAD_BYTES))
        opcode = node = 0
        if received >= IN_HEADER_BYTES:
            _, opcode, _, node, *_ = _HEADER.unpack_from(self._message)
        data = self._data[:0]
        if opcode == _WRITE:
            message = self._message[:head]
            if received > head:
                data = self._one_run(_behind(readable, head))
        else:
            count = min(received, ARGUMENTS_BYTES_MAX)
            gathered = self._gather(self._message, readable, count)
            message = self._message[:gathered]
        self._header_runs, self._body_runs = _split(writable, OUT_HEADER_BYTES)
        self._body_bytes = sum(map(len, self._body_runs))
        return message, received, data, self._place(opcode, node)

    def _gather(self, into: memoryview, runs: list[memoryview], count: int) -> int:
        at = 0
        for run in runs:
            part = run[: count - at]
            into[at : at + len(part)] = part
            at += len(part)
            if at == count:
                break
        return at

    def _one_run(self, runs: list[memoryview]) -> memoryview:
        if len(runs) == 1:
            return runs[0]
        count = self._gather(self._data, runs, min(sum(map(len, runs)), len(self._data)))
        self.bytes_copied += count
        return self._data[:count]

    def _place(self, opcode: int, node: int) -> Target:
        """Where the answer's body is made: the guest's memory wherever that can be."""
        runs = self._body_runs
        self._in_place = None
        if len(runs) == 1:
            self._in_place = runs[0].obj
            return runs[0]
        if (
            opcode == _READ
            and runs
            and self._body_bytes >= len(runs) * DIRECT_RUN_BYTES_LEAST
            and self._scatters(node)
        ):
            return Scatter(runs)
        return self._room[: self._body_bytes]

    def put(self, reply: Reply) -> int | None:
        """Put a reply into the chain; how many bytes were written, None where it has no room for them."""
        header = reply[0]
        total: int = OUT_HEADER.unpack_from(header)[0]
        body = reply[1] if len(reply) > 1 else None
        if total - OUT_HEADER_BYTES > self._body_bytes or sum(map(len, self._header_runs)) < OUT_HEADER_BYTES:
            return None
        if body is not None and not (isinstance(body, memoryview) and body.obj is self._in_place):
            self._scatter(self._body_runs, body)
            if isinstance(body, memoryview):
                self.bytes_copied += len(body)
        self._scatter(self._header_runs, header)
        self.let_go()
        return total

    def let_go(self) -> None:
        """Keep nothing of the guest's memory: when it ends, the machine gets back what nobody has mapped."""
        self._header_runs = self._body_runs = _NO_RUNS
        self._in_place = None

    def _scatter(self, runs: list[memoryview], data: bytes | memoryview) -> None:
        at, end = 0, len(data)
        for run in runs:
            if at >= end:
                return
            part = data[at : at + len(run)]
            run[: len(part)] = part
            at += len(part)


def _split(runs: list[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """Runs of the first `count` bytes, and those behind them."""
    if runs and len(runs[0]) == count:
        return runs[:1], runs[1:]
    first: list[memoryview] = []
    for number, run in enumerate(runs):
        if len(run) >= count:
            rest = [run[count:]] if len(run) > count else []
            return [*first, run[:count]], rest + runs[number + 1 :]
        first.append(run)
        count -= len(run)
    return first, []


def _behind(runs: list[memoryview], count: int) -> list[memoryview]:
    return _split(runs, count)[1]
