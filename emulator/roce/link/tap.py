"""A link that writes a capture of everything that passes another link; Wireshark opens the file.

It captures each sent and received datagram by itself, with the identification of its ICRC as far as a socket
knows it. A socket does not show that of an arriving datagram, so the capture has the one that an emulated
peer sends. Packets of a kernel may thus appear with a wrong identification and a wrong ICRC.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Final

from emulator.roce.link.base import Link, Received
from emulator.roce.nic.verbs import Address, Burst
from emulator.roce.wire.flow import flow_of
from emulator.roce.wire.pcap import PcapWriter

log = logging.getLogger(__name__)

BUFFER_BYTES: Final = 1 << 20


class TappedLink:
    """A `Link` round another, which it closes. Raises OSError where the file cannot be made.

    Where it can be written no longer (a full disk), the capture ends there, which is logged; packets go on.
    """

    def __init__(self, link: Link, path: Path) -> None:
        self._link = link
        self._path = path
        self._has_ended = False
        self._file = path.open("wb", buffering=BUFFER_BYTES)
        self._writer = PcapWriter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def pending(self) -> Received | None:
        """See `Link`."""
        return self._captured(self._link.pending())

    def receive(self) -> Received | None:
        """See `Link`."""
        return self._captured(self._link.receive())

    def _captured(self, received: Received | None) -> Received | None:
        if received is not None:
            own = self._link.address
            to = Address(received.group, own.port) if received.group else own
            self._write(received.source, to, received.data, received.segment_size)
        return received

    def send(self, burst: Burst) -> None:
        """See `Link`. It captures a burst at once, even if the burst waits or is lost later."""
        self._write(self._link.address, burst.destination, burst.data, burst.segment_size)
        self._link.send(burst)

    def close(self) -> None:
        """See `Link`; the file is complete afterwards."""
        self._link.close()
        try:
            self._file.close()
        except OSError as why:
            self._end(why)

    def _end(self, why: OSError) -> None:
        if not self._has_ended:
            self._has_ended = True
            log.warning("the capture %s ends here, packets go on: %s", self._path, why.strerror)

    def _write(self, source: Address, destination: Address, data: memoryview, segment_size: int) -> None:
        if self._has_ended:
            return
        flow = flow_of(source.ip, destination.ip, source.port)
        now = time.time()
        peer = destination.ip if source.ip == self._link.address.ip else source.ip
        numbered = self._link.numbers_segments(peer)
        try:
            self._writer.write_burst(flow, data, segment_size, now, numbered=numbered)
        except OSError as why:
            self._end(why)
