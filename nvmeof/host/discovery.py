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


def read_discovery_log() -> Procedure[DiscoveryLog]:
    """The whole log, from one generation of it.

    The log may change between its header and its entries, so the generation is compared before and after,
    and the reading repeated if it differs.
    """
    for _ in range(TRIES):
        command = yield from done(commands.get_log_page(LogPage.DISCOVERY, DISCOVERY_HEADER.size, nsid=0))
        assert command.data_in is not None
        generation, count = decode_discovery_header_untrusted(command.data_in)
        length = DISCOVERY_HEADER.size + count * DISCOVERY_ENTRY.size
        command = yield from done(commands.get_log_page(LogPage.DISCOVERY, length, nsid=0))
        assert command.data_in is not None
        if decode_discovery_header_untrusted(command.data_in) == (generation, count):
            return decode_discovery_log_untrusted(command.data_in)
    raise RemoteProtocolError("the discovery log does not hold still", fatal_error_status=None)
