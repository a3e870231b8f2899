"""Builders of commands. Data lengths are in bytes, block counts are counted from 1.

NVM Command Set 1.0, chapter 3; NVMe Base 2.0, chapter 5; for Fabrics commands, `wire/fabrics.py`.
"""

from collections.abc import Sequence
from typing import Final

from nvmeof.host.command import Command
from nvmeof.tcp.crc32c import Buffer
from nvmeof.wire.authentication import MAX_MESSAGE_BYTES
from nvmeof.wire.fabrics import Authentication, Connect, ConnectData, FabricsType, PropertyAccess
from nvmeof.wire.features import Feature, encode_queue_count
from nvmeof.wire.identify import IDENTIFY_BYTES
from nvmeof.wire.log_page import LogPageRequest
from nvmeof.wire.properties import Property
from nvmeof.wire.sqe import AdminOpcode, IoOpcode

AUTHENTICATION_SEND: Final = "authentication send"
AUTHENTICATION_RECEIVE: Final = "authentication receive"
"""Names of the commands whose answers may wait for arithmetic."""


def whole_bytes(parts: Sequence[Buffer]) -> Sequence[Buffer]:
    """Buffers whose `len` is their size in bytes."""
    return [
        part.cast("B") if isinstance(part, memoryview) and part.nbytes != len(part) else part
        for part in parts
    ]


def read(nsid: int, slba: int, blocks: int, into: memoryview) -> Command:
    """Read `blocks` logical blocks from `slba` into `into`, which has exactly their size."""
    return Command(
        "read", IoOpcode.READ, nsid, slba & 0xFFFF_FFFF, slba >> 32, blocks - 1 & 0xFFFF, data_in=into
    )


def write(nsid: int, slba: int, blocks: int, parts: Sequence[Buffer]) -> Command:
    """Write `parts`, together exactly `blocks` logical blocks, from `slba` on."""
    return Command(
        "write",
        IoOpcode.WRITE,
        nsid,
        slba & 0xFFFF_FFFF,
        slba >> 32,
        blocks - 1 & 0xFFFF,
        data_out=whole_bytes(parts),
    )


def flush(nsid: int) -> Command:
    """Make everything that was written to the namespace durable."""
    return Command("flush", IoOpcode.FLUSH, nsid)


def identify(cns: int, nsid: int = 0, *, csi: int = 0) -> Command:
    """Identify: 4096 bytes into `data_in`, for the decoders of `wire/identify`."""
    return Command(
        f"identify {cns:#04x}",
        AdminOpcode.IDENTIFY,
        nsid,
        cns,
        csi << 24,
        data_in=memoryview(bytearray(IDENTIFY_BYTES)),
    )


def get_log_page(
    page: int,
    length: int,
    *,
    offset: int = 0,
    nsid: int = 0xFFFF_FFFF,
    specific: int = 0,
) -> Command:
    """`length` bytes (a multiple of 4) of a log page from `offset` on.

    A page may be shorter than that. What lies behind its end is undefined (NVMe Base 2.0, Get Log Page), and
    a controller need not send it: it is zeros here.
    """
    request = LogPageRequest(page, length, offset, specific=specific)
    command = Command(
        f"get log page {page:#04x}",
        AdminOpcode.GET_LOG_PAGE,
        nsid,
        *request.dwords(),
        data_in=memoryview(bytearray(length)),
    )
    command.may_be_short = True
    return command


def set_features(feature: int, value: int) -> Command:
    return Command(f"set feature {feature:#04x}", AdminOpcode.SET_FEATURES, 0, feature, value)


def set_queue_count(queues: int) -> Command:
    """Ask for I/O queue pairs; `result` has the granted ones (`features.decode_queue_count`)."""
    return set_features(Feature.QUEUE_COUNT, encode_queue_count(queues, queues))


def async_event_request() -> Command:
    """Ends when something happens; `result` says what (`features.AsyncEvent`)."""
    return Command("asynchronous event request", AdminOpcode.ASYNC_EVENT_REQUEST)


def keep_alive() -> Command:
    """Tell the controller that this host lives."""
    return Command("keep alive", AdminOpcode.KEEP_ALIVE)


def abort(qid: int, cid: int) -> Command:
    """Ask for a command to be aborted. Bit 0 of `result` is set if it was not."""
    return Command("abort", AdminOpcode.ABORT, 0, qid | cid << 16)


def _fabrics(
    name: str,
    kind: FabricsType,
    fields: Connect | PropertyAccess | Authentication,
    *,
    data_in: memoryview | None = None,
    data_out: Sequence[Buffer] = (),
) -> Command:
    """Data to the controller travel in the capsule."""
    return Command(
        name, AdminOpcode.FABRICS, kind, *fields.dwords(),
        data_in=data_in, data_out=data_out, in_capsule=bool(data_out),
    )  # fmt: skip


def connect(fields: Connect, data: ConnectData) -> Command:
    """Connect a queue; bits 15:0 of `result` are the controller id."""
    return _fabrics("connect", FabricsType.CONNECT, fields, data_out=(data.encode(),))


def property_get(offset: Property) -> Command:
    """Read a property; its value is `result`."""
    return _fabrics("property get", FabricsType.PROPERTY_GET, PropertyAccess(offset, offset.bytes))


def property_set(offset: Property, value: int) -> Command:
    fields = PropertyAccess(offset, offset.bytes, value)
    return _fabrics("property set", FabricsType.PROPERTY_SET, fields)


def authentication_send(message: bytes) -> Command:
    """Send an authentication message of `wire/authentication.py`."""
    fields = Authentication(receive=False, length=len(message))
    return _fabrics(AUTHENTICATION_SEND, FabricsType.AUTHENTICATION_SEND, fields, data_out=(message,))


def authentication_receive() -> Command:
    """Receive one into `data_in`, with zeros behind it.

    The length is one of allocation (NVMe Base 2.0, Authentication Receive): SPDK's target sends the message
    alone, Linux's as many bytes as were allocated.
    """
    fields = Authentication(receive=True, length=MAX_MESSAGE_BYTES)
    data_in = memoryview(bytearray(MAX_MESSAGE_BYTES))
    command = _fabrics(AUTHENTICATION_RECEIVE, FabricsType.AUTHENTICATION_RECEIVE, fields, data_in=data_in)
    command.may_be_short = True
    return command
