"""A discovery controller that stays connected: its log is read again at each change. See `reconnect.py`.

    await follow_discovery(opener, listed, unreachable, policy)

The keep-alive timer makes the connection a persistent one (NVMe-oF 1.1, 1.5.7); the session asks for the
Discovery Log Page Change event (NVMe Base 2.0, 5.2). No change is lost: reading the log arms the event anew,
and a change that the reading has missed raises it at once. A controller without that event is asked from time
to time.
"""

import logging
import math
from collections.abc import Callable, Sequence

import trio

from nvmeof.errors import NvmeofError, RemoteProtocolError
from nvmeof.host import commands
from nvmeof.host.controller_session import Change
from nvmeof.host.procedure import Procedure, data_of
from nvmeof.transport import reconnect
from nvmeof.wire import log_page
from nvmeof.wire.features import AEC_DISCOVERY_CHANGED

log = logging.getLogger(__name__)

ASK_ANYWAY_S = 60.0
"""How often a controller is asked that does not tell of changes by itself."""
READ_AGAIN_S = 1.0
"""After a reading that failed although the controller is there."""
TRIES = 5
PIECE_BYTES = 64 << 10
"""Of the log with one command: no controller moves less at a time (MDTS) than a few pages."""


async def follow_discovery(
    opener: reconnect.Opener,
    listed: Callable[[Sequence[log_page.DiscoveryEntry]], None],
    unreachable: Callable[[NvmeofError | None], None],
    policy: reconnect.ReconnectPolicy,
) -> None:
    """Until cancelled, or until the policy gives the controller up. Raises nothing of the fabric's.

    `listed` gets the log after each connect and after each change. `unreachable` is called when the
    controller went away or was not reached: it is tried again, and its last log counts. Neither may block.
    """
    async with reconnect.keep_controller(opener, policy) as keeper:
        told: log_page.DiscoveryLog | None = None
        due = False
        wait_s: float = ASK_ANYWAY_S
        while True:
            if due and keeper.controller is not None:
                found = await _read(keeper)
                due = found is None
                wait_s = READ_AGAIN_S if found is None else math.inf if _tells(keeper) else ASK_ANYWAY_S
                if found is not None and found != told:
                    told = found
                    listed(found.entries)
            with trio.move_on_after(wait_s) as waiting:
                match await keeper.events.receive():
                    case reconnect.Connected():
                        due, told = True, None
                    case Change.DISCOVERY:
                        due = True
                    case reconnect.Disconnected(error):
                        due = False
                        unreachable(error)
                    case reconnect.GivenUp():
                        return
                    case _:
                        pass
            if waiting.cancelled_caught and keeper.controller is not None:
                due = True


def _tells(keeper: reconnect.Keeper) -> bool:
    """Whether the controller tells of changes by itself."""
    controller = keeper.controller
    return controller is not None and controller.identify.oaes & AEC_DISCOVERY_CHANGED != 0


async def _read(keeper: reconnect.Keeper) -> log_page.DiscoveryLog | None:
    """The log; None where that failed, which the log says once a try."""
    assert keeper.controller is not None
    try:
        return await keeper.controller.perform(read_discovery_log())
    except NvmeofError as error:
        log.info("a discovery log was not read, and is read again: %s", error)
        return None


def read_discovery_log() -> Procedure[log_page.DiscoveryLog]:
    """The whole log, from one generation of it.

    The log may change between its header and its entries, so the generation is compared before and after,
    and the reading repeated if it differs. Reading the header arms the event that tells of changes
    (it is read without "retain asynchronous event"), so a change after that is told of.
    """
    for _ in range(TRIES):
        header = yield from _piece(0, log_page.DISCOVERY_HEADER.size)
        generation, count = log_page.decode_discovery_header_untrusted(header)
        length = log_page.DISCOVERY_HEADER.size + count * log_page.DISCOVERY_ENTRY.size
        whole = bytearray()
        while len(whole) < length:
            whole += yield from _piece(len(whole), min(PIECE_BYTES, length - len(whole)))
        # The header in the first piece is older than the entries of the others.
        after = whole if length <= PIECE_BYTES else (yield from _piece(0, log_page.DISCOVERY_HEADER.size))
        before = log_page.decode_discovery_header_untrusted(whole)
        if before == (generation, count) == log_page.decode_discovery_header_untrusted(after):
            return log_page.decode_discovery_log_untrusted(whole)
    raise RemoteProtocolError("the discovery log does not hold still", fatal_error_status=None)


def _piece(offset: int, length: int) -> Procedure[memoryview]:
    return data_of(commands.get_log_page(log_page.LogPage.DISCOVERY, length, offset=offset, nsid=0))
