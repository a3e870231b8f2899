"""A TCP I/O queue for one thread: blocking, run to completion. Read `base.HostQueue` first.

The waiter receives for every command in flight until its own is done. Payload goes from the socket straight
into the command's buffer, with few calls and wake-ups (`receive_mark.py`). SO_RCVTIMEO keeps deadlines; it is
set anew only when the time left differs by more than a slack.

Sending never blocks in the socket: the rest waits in the queue's `output` and goes out in turn with
receiving. Two ends that both only send would wait for each other.

A kernel repeats the send queue of a socket that is gone, so a write of a killed process could land behind
those of its successor. So the socket is closed hard where commands are in flight (SO_LINGER of 0 s: the send
queue is dropped and the controller gets a reset), by the kernel too when the process dies.
"""

import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from nvmeof import errors
from nvmeof.host.bring_up import join
from nvmeof.host.command import Command
from nvmeof.host.procedure import each_command
from nvmeof.host.tcp_queue import TcpQueue
from nvmeof.limits import CONNECT_TIMEOUT_S
from nvmeof.transport.base import ControllerInfo
from nvmeof.transport.receive_mark import LONG_BYTES, ReceiveMark
from nvmeof.transport.socket_options import set_options

SLACK_S: Final = 0.002
SLACK_PART: Final = 1 / 64
"""How inexact a deadline may be kept: by so many seconds, or by that part of what is left until then."""

MOST_BUFFERS: Final = 256
"""Buffers in one sendmsg; the kernel allows 1024."""

DRAIN_CALLS: Final = 64
"""Receives in one look for what has arrived already; each takes at most what the socket holds."""

_DONT_WAIT: Final[int] = socket.MSG_DONTWAIT
_TIMEVAL: Final = struct.Struct("@ll")
_LINGER: Final = struct.Struct("@ii")
END_HARD: Final = _LINGER.pack(1, 0)
END_IN_ORDER: Final = _LINGER.pack(0, 0)
"""SO_LINGER: on for 0 s, and off (socket(7))."""


def open_socket(host: str, port: int, timeout_s: float) -> socket.socket:
    """A blocking TCP connection without Nagle's delay, which is closed hard; raises `ConnectionLost`."""
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
        sock.settimeout(None)
        set_options(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, END_HARD)
    except OSError as error:
        raise errors.ConnectionLost(f"cannot connect to {host} port {port}: {error}") from error
    return sock


class TcpHostQueue:
    """`HostQueue` over a connected socket, which it owns. All calls come from one thread."""

    def __init__(self, sock: socket.socket, queue: TcpQueue, max_transfer: int) -> None:
        self.max_transfer = max_transfer
        self.depth = queue.depth
        self.alive = True
        self._heard = 0
        self._sock = sock
        self._queue = queue
        self._why = ""
        self._armed = 0.0
        self._mark = ReceiveMark(sock)
        self._is_behind = False
        """The last payload was not there when it was asked for with what follows it."""
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLOUT)

    @property
    def in_flight(self) -> int:
        return self._queue.in_flight

    @property
    def abandoned(self) -> int:
        return self._queue.abandoned

    @property
    def needs_reconnect(self) -> bool:
        """Never: to abandon a command leaves an NVMe/TCP connection as it is."""
        return False

    def reconnect(self) -> None:
        """It never needs to."""

    def register(self, buffer: memoryview) -> None:
        """Sockets take any memory."""

    def has_room(self, commands: int) -> bool:
        queue = self._queue
        if queue.in_flight + commands > queue.depth and self.alive:
            self._drain()
        return queue.in_flight + commands <= queue.depth

    def submit(self, command: Command, *, more: bool = False) -> None:
        """Put it on the wire. Raises `QueueFull` and `ConnectionLost`; then it was not submitted."""
        self.submit_all((command,), more=more)

    def submit_all(self, commands: Sequence[Command], *, more: bool = False) -> None:
        if not self.alive:
            raise errors.ConnectionLost(self._why)
        # Answers that nobody waits for (to abandoned commands) may make room.
        self.has_room(len(commands))
        if not self.alive:
            raise errors.ConnectionLost(self._why)
        queue, now = self._queue, time.monotonic()
        try:
            for command in commands:
                queue.submit(command, now)
                command.heard = self._heard
        finally:
            if not more:
                self._push()

    def wait(self, command: Command, deadline: float, at_least: int | None = None) -> bool:
        queue = self._queue
        while not command.done:
            if at_least is not None and command.received >= at_least:
                return True
            if command.cid < 0:
                raise errors.LocalProtocolError(f"{command!r} was not submitted")
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self._drain()
                return (at_least is not None and command.received >= at_least) or command.done
            if queue.output:
                # As after an R2T. The socket mostly takes it at once; only what it did not needs a poll.
                self._push()
                if queue.output:
                    self._push_and_pull(remaining)
                continue
            slack = max(SLACK_S, remaining * SLACK_PART)
            if not -slack < self._armed - remaining < slack:
                self._arm(remaining)
            if queue.receiving is None:
                self._mark.clear()
                if queue.in_flight > 1:
                    self._receive_many(queue.next_buffers())
                else:
                    buffer = queue.next_buffer()
                    self._receive(buffer, len(buffer), 0)
            else:
                wanted = at_least - command.received if at_least is not None else 0
                self._receive_payload(wanted if queue.receiving is command else 0)
        return True

    def _receive_payload(self, wanted: int) -> None:
        """One receive of payload: the whole of it in few calls, or `wanted` bytes if that is not 0. Where
        several commands are in flight, with what follows it."""
        queue = self._queue
        buffer = queue.next_buffer()
        size = len(buffer)
        if wanted:
            size = min(size, wanted)
        elif size <= LONG_BYTES and not self._is_behind and queue.in_flight > 1:
            # It comes back with whatever is there. Where that is not all, the rest is waited for, as below.
            self._mark.clear()
            self._is_behind = self._receive_many(queue.next_buffers()) < size
            return
        self._is_behind = False
        self._receive(buffer, size, self._mark.flags_for(size))

    def abandon(self, command: Command) -> None:
        self._queue.abandon(command)

    def oldest_abandoned(self) -> float | None:
        """Takes what has arrived into account."""
        if self.alive and self._queue.oldest_abandoned() is not None:
            self._drain()
        return self._queue.oldest_abandoned()

    def silent_since(self) -> float | None:
        """A stream out of step says nothing, and its connection stands."""
        return self._queue.oldest_abandoned(self._heard)

    def close(self) -> None:
        """Hang up. An NVMe/TCP connection needs no goodbye: its end is the end of the queue."""
        self._die("closed by us")

    def give_up(self, reason: str) -> None:
        """Hang up. The commands in flight are lost for this reason."""
        self._die(reason)

    def wait_until_ready(self, deadline: float) -> None:
        """Receive until the connection is initialized; raises what went wrong."""
        self._queue.start()
        self._push()
        while self.alive and not self._queue.ready:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self._die("no answer to ICReq")
                break
            self._arm(remaining)
            buffer = self._queue.next_buffer()
            self._receive(buffer, len(buffer), 0)
        if not self.alive:
            raise errors.ConnectionLost(self._why)

    def _arm(self, seconds: float) -> None:
        """Let receives return after `seconds`. Zero would mean for ever."""
        micros = max(int(seconds * 1e6), 1000)
        timeval = _TIMEVAL.pack(*divmod(micros, 1_000_000))
        with suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._armed = micros / 1e6

    def _receive(self, buffer: memoryview, size: int, flags: int) -> bool:
        """One receive. False if nothing was there within the time, or the connection died."""
        try:
            count = self._sock.recv_into(buffer, size, flags)
        except BlockingIOError:
            return False
        except OSError as failure:
            self._die(f"{failure.strerror or failure}")
            return False
        return self._take(count)

    def _receive_many(self, buffers: list[memoryview]) -> int:
        """One receive into several buffers, of what is there; so many bytes."""
        try:
            count = os.readv(self._sock.fileno(), buffers)  # half the price of recvmsg
        except BlockingIOError:
            return 0
        except OSError as failure:
            self._die(f"{failure.strerror or failure}")
            return 0
        self._take(count)
        return count

    def _take(self, count: int) -> bool:
        """So many bytes were received; False where that ends the connection."""
        if count == 0:
            self._die("the controller closed the connection" + (" amid a PDU" if self._queue.mid_pdu else ""))
            return False
        self._heard += count
        try:
            self._queue.received(count)
        except errors.RemoteProtocolError as error:
            self._complain(error)
            return False
        return True

    def _drain(self) -> None:
        """Take all that has arrived, without waiting, and send the output."""
        for _ in range(DRAIN_CALLS):
            if not self.alive:
                return
            self._push()
            if not self.alive:  # since then
                return  # type: ignore[unreachable]
            buffer = self._queue.next_buffer()
            if not self._receive(buffer, len(buffer), _DONT_WAIT):
                return

    def _push(self) -> None:
        """Send what the kernel takes at once."""
        queue = self._queue
        while queue.output:
            output = queue.output
            try:
                if len(output) == 1:
                    count = self._sock.send(output[0], _DONT_WAIT)
                else:
                    count = self._sock.sendmsg(output[:MOST_BUFFERS], (), _DONT_WAIT)
            except BlockingIOError:
                return
            except OSError as error:
                self._die(f"{error.strerror or error}")
                return
            queue.sent(count)

    def _push_and_pull(self, remaining: float) -> None:
        """There is something to send that did not fit: wait for either direction."""
        self._mark.clear()
        for _, ready in self._poll.poll(max(remaining * 1000, 1)):
            if ready & ~select.POLLOUT:
                buffer = self._queue.next_buffer()
                self._receive(buffer, len(buffer), _DONT_WAIT)
            if ready & select.POLLOUT and self.alive:
                self._push()

    def _complain(self, error: errors.RemoteProtocolError) -> None:
        """Tell the controller what it did wrong, and hang up."""
        request = self._queue.termination(error)
        # Amid a PDU of ours the request would be taken for its payload.
        tell = request is not None and not self._queue.output
        if request is not None and tell:
            with suppress(OSError):
                self._sock.send(request, _DONT_WAIT)
        self._die(error.reason, in_order=tell)

    def _die(self, reason: str, *, in_order: bool = False) -> None:
        """`in_order`: the last bytes sent are still to arrive, also with commands in flight."""
        if not self.alive:
            return
        self.alive = False
        self._why = reason
        if in_order or not self._queue.in_flight:
            with suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, END_IN_ORDER)
        self._queue.fail(reason)
        self._sock.close()


def connect_io_queue(
    info: ControllerInfo, qid: int, depth: int, timeout_s: float = CONNECT_TIMEOUT_S
) -> TcpHostQueue:
    depth = info.queue_depth(qid, depth)
    deadline = time.monotonic() + timeout_s
    sock = open_socket(info.address.host, info.address.port, timeout_s)
    queue = TcpQueue(depth, digests=info.digests, in_capsule_bytes=info.facts.in_capsule_bytes)
    connection = TcpHostQueue(sock, queue, info.facts.max_transfer)
    try:
        connection.wait_until_ready(deadline)
        for command in each_command(join(info.config, qid, depth + 1, info.facts.cntlid)):
            connection.submit(command)
            if not connection.wait(command, deadline):
                connection.give_up(f"no answer within {timeout_s:g} s")
    except errors.NvmeofError:
        connection.close()
        raise
    return connection
