"""The services of a device for its queue pairs: address, paths, keys, clocks, events, packet buffers."""

import errno
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from emulator.roce.nic.congestion import CongestionSettings, DeviceCongestion
from emulator.roce.nic.counters import Count
from emulator.roce.nic.memory import KeyTable
from emulator.roce.nic.packets_out import VOLLEY_BURSTS, PacketWriter, rows_of
from emulator.roce.nic.path import Path
from emulator.roce.nic.retry import RetryClock
from emulator.roce.nic.verbs import AddressVector, AsyncEvent, Limits, Mtu, VerbsError
from emulator.roce.wire.flow import flow_of

WINDOW_BYTES: Final = 320 << 10
"""Bytes that one connection has under way. Small, because they must fit into the peer's socket buffer (416
KiB without privilege, and payload counts for some more), and a larger window falls out of the cache."""

CONNECTIONS_AT_FULL_SPEED: Final = 2
"""All connections to one address together have at most this many windows under way (and one volley, or the
answer to one READ request, beyond it), because they share one socket buffer."""

MAX_PATHS: Final = 4096

MAX_EVENTS: Final = 1024
"""Asynchronous events that wait to be taken; later ones are counted and lost. A program that takes events has
a few at most."""


class DeviceServices:
    """The base of a `Nic`: the part that knows no queue pair."""

    def __init__(
        self, address: str, rng: random.Random, mtu: int, limits: Limits | None, window_bytes: int
    ) -> None:
        self.address = address
        self.port_mtu = Mtu.of(mtu)
        self.limits = limits or Limits()
        self.counters: Counter[str] = Counter()
        self.async_events: deque[AsyncEvent] = deque()
        self.on_async_event: Callable[[], None] | None = None
        self.keys = KeyTable(self.limits, rng)
        self.running: dict[RetryClock, Callable[[float], None]] = {}
        """Running clocks, at most one for each queue pair, and the functions that they call."""
        self.writer = PacketWriter()
        self.window_bytes = window_bytes
        self.segments_numbered = False
        self.congestion: DeviceCongestion | None = None
        self._paths: dict[str, Path] = {}

    def path_to(self, ip: str) -> Path:
        """The way to an address, made once."""
        path = self._paths.get(ip)
        if path is None:
            if len(self._paths) >= MAX_PATHS:
                self._paths.clear()
            path = self._paths[ip] = Path(
                self.address, ip, self.segments_numbered, self.window_bytes * CONNECTIONS_AT_FULL_SPEED
            )
        return path

    def number_segments(self, ip: str, yes: bool) -> None:
        """Whether segment i of a burst to `ip` will carry IP identification i; `segments_numbered` is what
        holds for addresses that nothing was said about."""
        self.path_to(ip).numbered = yes

    def window_packets(self, mtu: int) -> int:
        """Packets that a connection may have under way."""
        return max(8, self.window_bytes // mtu)

    def volley_packets(self, path: Path, mtu: int) -> int:
        """Packets of a long message that are made at once: whole bursts, a quarter of the window at most, so
        that the peer's answers come while others are under way. One burst where segments are numbered, since
        the numbers begin anew with each."""
        rows = rows_of(mtu)
        if path.numbered:
            return rows
        return rows * max(1, min(VOLLEY_BURSTS, self.window_packets(mtu) // 4 // rows))

    def piece_packets(self, mtu: int) -> int:
        """Packets of the answer to one READ request. The first and the last of them go by themselves (they
        alone carry an AETH), the others in rows: as many full rows as leave room in the window for the next
        request to be under way."""
        window, rows = self.window_packets(mtu), rows_of(mtu)
        full = (window * 4 // 5 - 2) // rows
        return full * rows + 2 if full else window // 2

    def control_congestion(self, settings: CongestionSettings | None) -> None:
        """Take part in congestion control from now on, or (None, the default) no more: `congestion.py`."""
        if self.congestion is not None:
            # Connections that wait for their time are not forgotten with it.
            self.congestion.advance(float("inf"))
        self.congestion = DeviceCongestion(settings) if settings is not None else None

    def check_address(self, av: AddressVector) -> None:
        """EINVAL where nothing can be sent to this address from here."""
        if av.port_num != 1 or av.sgid_index != 0:
            raise VerbsError(errno.EINVAL, f"there is no port {av.port_num} or GID {av.sgid_index}")
        try:
            flow_of(av.ip, self.address)
        except ValueError as error:
            raise VerbsError(errno.EINVAL, f"no way to {av.ip!r}: {error}") from error

    def raise_event(self, event: AsyncEvent) -> None:
        """Report an asynchronous event to the program."""
        if len(self.async_events) >= MAX_EVENTS:
            self.counters[Count.EVENTS_LOST] += 1
            return
        self.async_events.append(event)
        if self.on_async_event is not None:
            self.on_async_event()
