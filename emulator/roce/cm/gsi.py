"""Queue pair 1 of a `Nic` as the connection manager's way into the network, and both as one station.

The connection manager is an ordinary user of the device: it posts receives for management datagrams and sends
its own inline. An `Endpoint` is a device with its connection manager, still without I/O; the threads of
`emulator.roce.runtime` drive it.
"""

from collections.abc import Callable
from typing import Final

from emulator.roce.cm.manager import ConnectionManager
from emulator.roce.nic import verbs
from emulator.roce.nic.memory import AddressHandle
from emulator.roce.nic.nic import Nic
from emulator.roce.nic.states import mask_to
from emulator.roce.nic.work_requests import ReceiveRequest, SendRequest
from emulator.roce.wire.mad import MAD_BYTES

SLOTS: Final = 64
"""Receives posted; each is posted again before the next burst is looked at."""

MAX_SENDS: Final = 1024
"""Messages that wait in the send queue; more are dropped, as if the network had lost them."""

MAX_HANDLES: Final = 1024
"""Addresses that were written to and are remembered."""


class GeneralServices:
    def __init__(self, nic: Nic) -> None:
        self.waiting = False
        """Something has arrived."""
        self.dropped = 0
        self._nic = nic
        self._pd = nic.alloc_pd()
        # As large as a datagram can be: one that finds too little room would end the queue pair.
        self._slot_bytes = verbs.GRH_BYTES + nic.port_mtu.bytes
        self._memory = memoryview(bytearray(SLOTS * self._slot_bytes))
        self._region = nic.reg_mr(self._pd, self._memory, 0, verbs.Access.LOCAL_WRITE)
        self._arrived = nic.create_cq(SLOTS)
        self._sent = nic.create_cq(MAX_SENDS)
        bounds = verbs.QpCapabilities(MAX_SENDS, SLOTS, 1, 1, MAD_BYTES)
        self._qp = nic.create_qp(self._pd, verbs.QpType.UD, self._sent, self._arrived, bounds, gsi=True)
        for state in (verbs.QpState.INIT, verbs.QpState.RTR, verbs.QpState.RTS):
            attributes = verbs.QpAttributes(state=state, port_num=1, qkey=verbs.GSI_QKEY)
            self._qp.modify(attributes, mask_to(verbs.QpType.UD, state))
        self._handles: dict[str, AddressHandle] = {}
        self._arrived.on_entry = self._has_arrived
        for slot in range(SLOTS):
            self._post(slot)

    def _has_arrived(self) -> None:
        self.waiting = True

    def _post(self, slot: int) -> None:
        sge = verbs.Sge(slot * self._slot_bytes, self._slot_bytes, self._region.lkey)
        self._qp.post_recv(ReceiveRequest(slot, (sge,)))

    def take(self, receive: Callable[[memoryview, str, float], None], now: float) -> None:
        """Pass arrived datagrams to `receive`: payload, the sender's address, and `now`."""
        self.waiting = False
        for done in self._arrived.poll(SLOTS):
            if done.status is not verbs.WcStatus.SUCCESS:
                continue
            start = done.wr_id * self._slot_bytes
            receive(self._memory[start + verbs.GRH_BYTES : start + done.byte_len], done.source, now)
            self._post(done.wr_id)

    def send(self, ip: str, mad: bytes) -> None:
        """Post a management datagram to queue pair 1 of an address; dropped and counted where that fails."""
        try:
            handle = self._handles.get(ip)
            if handle is None:
                if len(self._handles) >= MAX_HANDLES:
                    # Requests that still wait keep theirs; only the device's table of handles is relieved.
                    while self._handles:
                        self._nic.destroy_ah(self._handles.popitem()[1])
                handle = self._handles[ip] = self._nic.create_ah(self._pd, verbs.AddressVector(ip))
            request = SendRequest(
                flags=verbs.SendFlags.INLINE,
                ah=handle,
                remote_qpn=verbs.GSI_QPN,
                remote_qkey=verbs.GSI_QKEY,
                inline=mad,
            )
            self._qp.post_send(request)
        except verbs.VerbsError:
            self.dropped += 1


class Endpoint:
    """A device and its connection manager as one protocol object. Callers hold the device's lock."""

    def __init__(self, nic: Nic, cm: ConnectionManager) -> None:
        self.nic = nic
        self.cm = cm
        self.on_async_event: Callable[[verbs.AsyncEvent], None] = nic.async_events.append
        """Takes asynchronous events for the program."""
        self._gsi = GeneralServices(nic)
        nic.on_async_event = self._async_event

    def receive(
        self,
        burst: memoryview,
        segment_size: int,
        source: verbs.Address,
        now: float,
        group: str = "",
        marked: bool = False,
    ) -> None:
        self.nic.receive(burst, segment_size, source, now, group, marked)
        if self._gsi.waiting:
            self._gsi.take(self.cm.receive, now)

    @property
    def expects(self) -> int:
        """Bytes that are still to come of a long message, and come by themselves: see `Nic.expects`."""
        return self.nic.expects

    def deadline(self) -> float | None:
        """When `advance` must be called, if nothing happens before."""
        mine, other = self.nic.deadline(), self.cm.deadline()
        if mine is None or other is None:
            return other if mine is None else mine
        return min(mine, other)

    def advance(self, now: float) -> None:
        self.nic.advance(now)
        self.cm.advance(now)

    def next_burst(self, now: float) -> verbs.Burst | None:
        """The next burst, to be sent or copied before any other call; None when that is all."""
        if self.cm.has_output:
            for ip, mad in self.cm.take_output():
                self._gsi.send(ip, mad)
        return self.nic.next_burst(now)

    def _async_event(self) -> None:
        event = self.nic.async_events.pop()
        if event.type is verbs.EventType.COMM_EST:
            connection = self.cm.find(getattr(event.element, "number", 0))
            if connection is not None:
                connection.communication_established()
        self.on_async_event(event)
