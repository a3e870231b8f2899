"""One connection of a host: a thread, a socket and an `nvmeof` controller queue, run to completion.

The queue (`nvmeof/controller/tcp_queue.py`) decides; this file moves its bytes with few system calls. Payload
is received directly into its place and sent from it (`page_sender.py`).

The thread blocks in `recv` when only the host can give it work, and otherwise polls the socket and an eventfd
by which other threads wake it. It never blocks in a send: a host that sends without reading must find its
commands read, or both sides wait for ever.
"""

import contextlib
import logging
import os
import select
import socket
import threading
import time
from typing import Final

from nvmeof.controller.target import Target
from nvmeof.controller.tcp_queue import TcpControllerQueue
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.linux_limits import SureThread
from nvmeof.transport.near_host import NearHost, incoming_processor
from nvmeof.transport.page_sender import PageSender, pays_here
from nvmeof.transport.receive_mark import LONG_BYTES, ReceiveMark
from nvmeof.transport.socket_options import set_options

log = logging.getLogger(__name__)

SOCKET_BUFFER_BYTES: Final = 4 << 20
"""Asked of the kernel for each direction, so that a 1 MiB answer leaves in few calls; it may give less."""

LONG_PAYLOAD_BYTES: Final = 64 << 10
LOOKS: Final = 2
"""After a payload of that length the next command is often there already: a host that stores a value sends
its directory along. The thread takes so many looks, one for a command and one for its data, and sends the
answers together; otherwise each answer wakes the host up."""

HELD_RECEIVES: Final = 8
"""For which short answers wait, as long as each brings something at once."""

WAIT_MAX_S: Final = 3600.0
"""The longest wait without a look at the queue."""

POLL_STEP_S: Final = 0.001
"""Of poll(2)."""

LINGER_S: Final = 1.0
"""How long a host that broke the protocol gets to read why, before the connection is reset."""


class Connection:
    """Serves one accepted socket until it ends."""

    def __init__(self, sock: socket.socket, target: Target, settings: TcpSettings, name: str) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._open = True
        with contextlib.suppress(OSError):
            set_options(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.queue = TcpControllerQueue(target, now=time.monotonic(), wake=self.wake, settings=settings)
        self._pages = PageSender(sock, by_reference=pays_here())
        self._mark = ReceiveMark(sock)
        self._near = NearHost(incoming_processor(sock))
        self.thread = SureThread(self._serve, name)

    def discard(self) -> None:
        """Close it before its thread was started."""
        self.queue.connection_lost()
        self._close()

    def wake(self) -> None:
        """Have the thread look at its queue again. From any thread, also after the end."""
        with self._lock:
            if not self._open:
                return
            os.eventfd_write(self._wake_fd, 1)
            if self.queue.session.close_reason is not None:
                # Only this ends a blocked recv.
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RD)

    def stop(self, reason: str) -> None:
        """End the connection from outside."""
        self.queue.session.close(reason)
        self.wake()

    def _serve(self) -> None:
        try:
            self._move_bytes()
            if self.queue.terminated:
                self._linger()
        except OSError as error:
            log.debug("%s: %s", self.thread.name, error)
        except Exception:
            # The last line of defence: a bug ends one connection, not the enclosure.
            log.exception("%s", self.thread.name)
        finally:
            self.queue.connection_lost()
            self._pages.close()
            self._close()
            log.debug("%s: %s", self.thread.name, self.queue.end_reason)

    def _close(self) -> None:
        with self._lock:
            if not self._open:
                return  # It was discarded, and its thread came to run after all.
            self._open = False
            os.close(self._wake_fd)
            self._sock.close()

    def _move_bytes(self) -> None:
        queue, monotonic, mark = self.queue, time.monotonic, self._mark
        receive, receive_many, descriptor = self._sock.recv_into, os.readv, self._sock.fileno()
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        looks = held = 0
        was_long = is_behind = False
        while True:
            if looks:
                looks = looks - 1 if not queue.ending and self._receive_some() else 0
                continue
            if held < HELD_RECEIVES and queue.may_hold_answers and self._receive_some():
                held += 1
                continue  # each send wakes the host, which has more to send just now
            held = 0
            blocked = queue.has_outgoing and not self._send()
            if queue.finished:
                return
            if queue.may_block:
                buffer = queue.next_buffer()
                size = len(buffer)
                if not queue.payload_left:
                    mark.clear()
                    count = receive(buffer)
                elif size > LONG_BYTES or is_behind:
                    is_behind = False
                    count = receive(buffer, 0, mark.flags_for(size))
                else:
                    # With what follows it. Where it is not all there, the rest is waited for.
                    mark.clear()
                    count = receive_many(descriptor, queue.next_buffers())
                    is_behind = count < size
                now = monotonic()
                if count:
                    self._received(count, now)
                    was_long = was_long or count >= LONG_PAYLOAD_BYTES
                    if was_long and not queue.payload_left:
                        looks, was_long = LOOKS, False
                else:
                    queue.run(now)
                    queue.end_of_stream()
                continue
            self._wait(poll, blocked)

    def _send(self) -> bool:
        """Send what there is; False if the socket has no room for all of it."""
        queue = self.queue
        while queue.has_outgoing:
            try:
                count = self._pages.send(queue.outgoing())
            except BlockingIOError:
                return False
            self._near.moved(count)
            queue.sent(count)
        return True

    def _received(self, count: int, now: float) -> None:
        if self.queue.payload_left:
            self._near.moved(count)
        else:
            self._near.command()
        self.queue.received(count, now)

    def _wait(self, poll: select.poll, blocked: bool) -> None:
        """Wait for the socket, another thread or the clock, and run the queue."""
        queue = self.queue
        self._mark.clear()
        mask = select.POLLOUT if blocked else 0
        if not queue.ending:
            mask |= select.POLLIN
        poll.register(self._sock, mask)
        # A host may ask for a keep-alive time of 49 days, and poll(2) takes 24.
        left = min(max(0.0, queue.deadline() - time.monotonic()), WAIT_MAX_S)
        # poll(2) takes whole milliseconds. The rest of one is slept, so that an imitated drive is not slower
        # than its model says.
        ready = dict(poll.poll(int(left * 1000)))
        if not ready and (left := min(queue.deadline() - time.monotonic(), POLL_STEP_S)) > 0:
            time.sleep(left)
        if self._wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        events = ready.get(self._sock.fileno(), 0)
        if events & select.POLLIN:
            self._receive_some()
        elif events & (select.POLLERR | select.POLLHUP | select.POLLNVAL) and not events & select.POLLOUT:
            queue.connection_lost()
            return
        queue.run(time.monotonic())

    def _receive_some(self) -> bool:
        """Receive what has arrived; False if nothing has."""
        queue = self.queue
        try:
            if queue.payload_left:
                count = self._sock.recvmsg_into(queue.next_buffers(), 0, socket.MSG_DONTWAIT)[0]
            else:
                count = self._sock.recv_into(queue.next_buffer(), 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if count:
            self._received(count, time.monotonic())
        else:
            queue.run(time.monotonic())  # `wake` may have shut it down, for a reason that run() knows
            queue.end_of_stream()
        return True

    def _linger(self) -> None:
        """Read on for a moment: closing with unread input would reset the connection before the host reads
        why.

        A wake-up ends it: another connection needs the place.
        """
        self._mark.clear()
        self._sock.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + LINGER_S
        sink = bytearray(64 << 10)
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0 and (ready := poll.poll(left * 1000)):
            if ready[0][0] == self._wake_fd or not self._sock.recv_into(sink, 0, socket.MSG_DONTWAIT):
                return
