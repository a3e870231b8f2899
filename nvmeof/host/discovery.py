"""Reading the discovery log (NVMe-oF 1.1, 5.3): a procedure over Get Log Page."""

from __future__ import annotations

from nvmeof.errors import RemoteProtocolError
from nvmeof.host import commands
from nvmeof.host.procedure import Procedure, done
from nvmeof.wire.log_page import (
    DISCOVERY_ENTRY,
    DISCOVERY_HEADER,
    DiscoveryLog,
    LogPage,
    decode_discovery_header_untrusted,
    decode_discovery_log_untrusted,
)

TRIES = 5
PIECE_BYTES = 64 << 10
"""Of the log with one command: no controller moves less at a time (MDTS) than a few pages."""


def read_discovery_log() -> Procedure[DiscoveryLog]:
    """The whole log, from one generation of it.

    The log may change between its header and its entries, so the generation is compared before and after,
    and the reading repeated if it differs. Reading the header arms the event that tells of changes
    (it is read without "retain asynchronous event"), so a change after that is told of.
    """
    for _ in range(TRIES):
        header = yield from _piece(0, DISCOVERY_HEADER.size)
        generation, count = decode_discovery_header_untrusted(header)
        length = DISCOVERY_HEADER.size + count * DISCOVERY_ENTRY.size
        whole = bytearray()
        while len(whole) < length:
            whole += yield from _piece(len(whole), min(PIECE_BYTES, length - len(whole)))
        # What came with the first piece is from before the entries of the others.
        after = whole if length <= PIECE_BYTES else (yield from _piece(0, DISCOVERY_HEADER.size))
        before = decode_discovery_header_untrusted(whole)
        if before == (generation, count) == decode_discovery_header_untrusted(after):
            return decode_discovery_log_untrusted(whole)
    raise RemoteProtocolError("the discovery log does not hold still", fatal_error_status=None)


def _piece(offset: int, length: int) -> Procedure[memoryview]:
    command = yield from done(commands.get_log_page(LogPage.DISCOVERY, length, offset=offset, nsid=0))
    assert command.data_in is not None
    return command.data_in
