"""A NIC, its connection manager and a link as one opened device, which acts by itself like hardware.

    device = Device("roce0", "127.0.0.2")
    with device.turn():                       every call of `device.nic` and `device.cm`
        qp.post_send(request)                 what it causes is sent at the end of the turn
    device.drive_until(lambda: len(cq), deadline)
    device.close()

`driver_seat.py` says which thread drives. Conditions of `drive_until` run with the lock held, so they do not
call `turn()` themselves.
"""

import ipaddress
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from emulator.roce.cm.gsi import Endpoint
from emulator.roce.cm.limits import CmTimes
from emulator.roce.cm.manager import ConnectionManager
from emulator.roce.link.base import Link
from emulator.roce.link.raw import RawCheckedLink
from emulator.roce.link.tap import TappedLink
from emulator.roce.link.udp import UdpLink, interface_mtu
from emulator.roce.nic.congestion import CongestionSettings
from emulator.roce.nic.counters import Count
from emulator.roce.nic.device_services import MAX_EVENTS
from emulator.roce.nic.nic import Nic
from emulator.roce.nic.verbs import AsyncEvent, Limits, Mtu
from emulator.roce.runtime.channel import EventChannel
from emulator.roce.runtime.driver_seat import Seat
from emulator.roce.runtime.errors import CannotOpen
from emulator.roce.wire.flow import packed_address

HEADER_ROOM: Final = 80
"""Bytes of the largest headers in a network interface's MTU, so that both ends find the path MTU of a
kernel's rxe: 1500 gives 1024."""

MIN_WINDOW: Final = 128 << 10
MAX_WINDOW: Final = 1 << 20
"""Measured with one stream, CPU time of each side per MiB: 256 KiB 770 us, 512 KiB 600 us, 1 MiB 550 us."""
MAX_LOOPBACK_WINDOW: Final = 2 << 20
"""Where bursts arrive whole, and so take little more of the socket's buffer than their bytes. A get of 1 MiB
then ends before anything of it has to be acknowledged. In turns with a window of 1 MiB it took a tenth less
processor time, and a quarter less time, since neither side falls asleep in the middle. All connections of a
device towards an address have two windows together (`CONNECTIONS_AT_FULL_SPEED`), so half a dozen devices at
full speed fit into the buffer that root gets (`SOCKET_BUFFER_BYTES`, which the kernel doubles); more lose
datagrams, and send them again."""

GUID_PREFIX: Final = 0x0235 << 48
"""GUIDs are the address behind this: locally administered, and the same after a restart."""


def guid_of(ip: str) -> int:
    """The GUID of a device, from the last 48 bits of its address."""
    return GUID_PREFIX | (int.from_bytes(packed_address(ip), "big") & ((1 << 48) - 1))


def window_for(receive_buffer_bytes: int, most: int = MAX_WINDOW) -> int:
    """Bytes that one connection has under way, from the size of our own socket buffer; the peer's is taken to
    be equal.

    A third of it, so that a few connections at once do not overflow it; the kernel counts its own overhead
    in, too. Up to `most` a larger window costs less for each byte: fewer acknowledgements, and fewer
    turns of falling asleep and waking up.
    """
    return max(MIN_WINDOW, min(most, receive_buffer_bytes // 3))


def path_mtu_at(ip: str) -> Mtu:
    """The largest RoCE MTU that fits into the packets of the interface with this address."""
    size = interface_mtu(ip)
    return Mtu.MTU_1024 if size is None else Mtu.of(max(size - HEADER_ROOM, 256))


class Device:
    """See the top of this file. Raises `CannotOpen` where the address or its UDP port cannot be had.

    `pcap` names a file that gets every packet; `mtu` is in bytes, by default what the interface allows;
    `check_icrc_in_full` receives by a raw socket (see `emulator.roce.link.raw`). With `congestion` the device
    takes part in congestion control (see `emulator.roce.nic.congestion`).
    """

    def __init__(
        self,
        name: str,
        ip: str,
        *,
        mtu: int | None = None,
        limits: Limits | None = None,
        times: CmTimes | None = None,
        pcap: Path | None = None,
        check_icrc_in_full: bool = False,
        congestion: CongestionSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.ip = ip
        self.clock = clock
        chance = random.Random()
        try:
            self.mtu = Mtu.of(mtu) if mtu is not None else path_mtu_at(ip)
            link: Link = self._open_link(ip, check_icrc_in_full, congestion is not None)
        except (OSError, ValueError) as error:
            raise CannotOpen(f"{name}: no RoCE port at {ip}: {error}") from error
        try:
            if pcap is not None:
                link = cast(Link, TappedLink(link, pcap))
        except OSError as error:
            link.close()
            raise CannotOpen(f"{name}: no capture in {pcap}: {error}") from error
        self.link = link
        most = MAX_LOOPBACK_WINDOW if ipaddress.ip_address(ip).is_loopback else MAX_WINDOW
        self.nic = Nic(
            ip,
            rng=chance,
            guid=guid_of(ip),
            mtu=self.mtu.bytes,
            limits=limits,
            window_bytes=window_for(link.receive_buffer_bytes, most),
        )
        self.nic.groups.on_join, self.nic.groups.on_leave = link.join, link.leave
        self.nic.control_congestion(congestion)
        self.nic.segments_numbered = link.numbers_segments("")
        # Peers in the kernel number their packets as they like; all peers on loopback are emulated.
        self.nic.solve_identification = self.nic.segments_numbered
        self.cm = ConnectionManager(ip, self.nic.guid, chance, mtu=self.mtu, times=times)
        self.endpoint = Endpoint(self.nic, self.cm)
        self.async_events: EventChannel[AsyncEvent] = EventChannel(MAX_EVENTS)
        """Asynchronous events of the device, behind a descriptor."""
        self.endpoint.on_async_event = self._keep_event
        self.nic.on_gone = self._forget_events_of
        seat = self._seat = Seat(self.endpoint, link, name, clock)
        self.lock = seat.lock
        """The lock of a turn: to look without sending anything. Otherwise take a `turn()`."""
        self.turn = seat.turn
        """`with device.turn():` round each call of `nic` and `cm`; not to be nested."""
        self.hold = seat.hold
        """`with device.hold():` round calls that cause nothing to be sent and end nobody's wait."""
        self.drive_until, self.drive_once = seat.drive_until, seat.drive_once
        """Wait until a condition holds; receive without waiting, for programs that poll in a loop."""
        seat.start()

    def _open_link(self, ip: str, check_in_full: bool, ecn: bool) -> Link:
        link = RawCheckedLink(ip, ecn=ecn) if check_in_full else UdpLink(ip, ecn=ecn)
        link.on_no_offload = lambda address: self.nic.number_segments(address, False)
        return link

    def _keep_event(self, event: AsyncEvent) -> None:
        dropped = self.async_events.dropped
        self.async_events.push(event)
        self.nic.counters[Count.EVENTS_LOST] += self.async_events.dropped - dropped

    def _forget_events_of(self, element: object) -> None:
        # Otherwise a program that takes no events (an enclosure, an agent) keeps every failed queue pair.
        self.async_events.discard(lambda event: event.element is element)

    def __repr__(self) -> str:
        return f"<Device {self.name} at {self.ip}{', closed' if self.closed else ''}>"

    @property
    def closed(self) -> bool:
        return self._seat.closed

    def close(self) -> None:
        """End connections, queue pairs, threads and the socket; waiting threads get `DeviceClosed`.

        It tells peers that their connections end, as a kernel does for a process, and does not wait for them.
        Closing twice is fine.
        """
        with self.turn():
            if not self.closed:
                # An interrupt may have left a connection in the midst of a packet: none may be in our way.
                self.nic.fall_silent()
                self.cm.close(self.clock())
        self._seat.close()
        with self._seat.lock:
            self.nic.close()
            self.link.close()
            self.async_events.close()
