"""What the processes of one agent tell each other: lines of JSON, over a socket between parent and child.

The parent sends one `Order`. The child sends `READY` once it serves, and then a `Report` now and then: its
counters, whole each time, and the uses of values since the last one. Both run the same program as one user.
"""

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

from agent.fs.fuse.abi import InitFlag
from agent.fs.fuse.session import Negotiated
from agent.pool.counters import CAUSES, MissCause, Tally
from agent.pool.volume.uses import Use

LINE_BYTES_MAX: Final = 4 << 20
_CHUNK_BYTES: Final = 64 << 10
_BY_CAUSE: Final = ("misses", "prefix_holes")
Counts = dict[str, Tally]
"""By volume; those of the fabric under the empty name."""


class Links(NamedTuple):
    """A reader's ends of its sockets to the first process."""

    link: socket.socket
    """For the order, and for reports."""
    slots: Sequence[socket.socket]
    """To those who lend slots."""
    s3: Sequence[socket.socket]
    """To the S3 door."""
    guests: Sequence[socket.socket]
    """To the doors of guests, in their order."""


class LinkBroken(Exception):
    """The other process is gone, or says what makes no sense."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a child needs to serve: `configuration` is JSON."""

    number: int
    processes: int
    configuration: str
    folder: str = ""
    """Where it is mounted; empty where the agent has no mount."""
    negotiated: Negotiated | None = None
    """With the kernel, of that mount."""
    s3_listen: Sequence[str] = ()
    """Where the first process has its S3 door; none: the child has none."""
    volumes: Sequence[str] = ()
    """Those that the first process serves, by id (hex). The child serves none that are newer in the map."""


@dataclass(frozen=True, slots=True)
class Report:
    """`tallies`: since the child began. `uses`: since its last report. `moved`: bytes that its mount has
    answered with. `s3`: the counters of its S3 door, `guests` of each guest, by its number."""

    tallies: Counts = field(default_factory=dict)
    uses: Sequence[Use] = ()
    moved: int = 0
    is_ready: bool = False
    s3: Mapping[str, Any] = field(default_factory=dict)
    guests: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def encode_order(order: Order) -> bytes:
    agreed = order.negotiated
    return _line(
        {
            "number": order.number,
            "folder": order.folder,
            "processes": order.processes,
            "configuration": order.configuration,
            "negotiated": agreed and [agreed.minor, int(agreed.flags), agreed.transfer_bytes],
            "s3": list(order.s3_listen),
            "volumes": list(order.volumes),
        }
    )


def decode_order(line: bytes) -> Order:
    """Raises LinkBroken."""
    try:
        found = json.loads(line)
        agreed = None
        if found["negotiated"] is not None:
            minor, flags, transfer_bytes = map(int, found["negotiated"])
            agreed = Negotiated(minor, InitFlag(flags), transfer_bytes)
        number, processes = int(found["number"]), int(found["processes"])
        listen = tuple(str(each) for each in found["s3"])
        volumes = tuple(str(each) for each in found["volumes"])
        return Order(
            number, processes, str(found["configuration"]), str(found["folder"]), agreed, listen, volumes
        )
    except (ValueError, KeyError, TypeError) as wrong:
        raise LinkBroken(f"no order: {wrong}") from None


def encode_report(report: Report) -> bytes:
    return _line(
        {
            "ready": report.is_ready,
            "moved": report.moved,
            "tallies": {volume: _as_dict(tally) for volume, tally in report.tallies.items()},
            "uses": [list(use) for use in report.uses],
            "s3": dict(report.s3),
            "guests": {number: dict(moved) for number, moved in report.guests.items()},
        }
    )


def decode_report(line: bytes) -> Report:
    """Raises LinkBroken."""
    try:
        found = json.loads(line)
        return Report(
            {str(volume): _tally(counts) for volume, counts in found["tallies"].items()},
            [Use(*map(int, use)) for use in found["uses"]],
            int(found["moved"]),
            bool(found["ready"]),
            dict(found["s3"]),
            {str(number): dict(moved) for number, moved in found["guests"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise LinkBroken(f"no report: {wrong}") from None


class Lines:
    """Lines out of the bytes that come, LINE_BYTES_MAX of one at the most."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def receive(self, link: socket.socket) -> Iterator[bytes]:
        """What has come whole, with one look at the socket. Raises LinkBroken once the other end is closed;
        BlockingIOError where nothing has come."""
        try:
            came = link.recv(_CHUNK_BYTES)
        except ConnectionError:
            came = b""
        if not came:
            raise LinkBroken("the other process has closed it")
        self._kept += came
        *whole, rest = self._kept.split(b"\n")
        self._kept = rest
        if len(rest) > LINE_BYTES_MAX:
            raise LinkBroken("a line without an end")
        yield from map(bytes, whole)


# Not by `__slots__`: a compiled class has none.
_COUNTS: Final = tuple(each.name for each in fields(Tally))


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _as_dict(tally: Tally) -> dict[str, Any]:
    """Those counts that are not zero."""
    found: dict[str, Any] = {}
    for name in _COUNTS:
        value = getattr(tally, name)
        if name in _BY_CAUSE:
            value = {str(cause.value): count for cause, count in value.items() if count}
        if value:
            found[name] = value
    return found


def _tally(counts: Mapping[str, Any]) -> Tally:
    tally = Tally()
    for name, value in counts.items():
        if name in _BY_CAUSE:
            causes = dict.fromkeys(CAUSES, 0)
            causes.update({MissCause(int(cause)): int(count) for cause, count in value.items()})
            setattr(tally, name, causes)
        else:
            setattr(tally, name, int(value))
    return tally
