"""NVMe/TCP, host role: the admin queue of a controller. Read `controller.py` first.

`tcp_queue.py` has the I/O queues.
"""

import os
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from typing import Any

import trio

from nvmeof.errors import ConnectionLost, RemoteProtocolError
from nvmeof.host.command import Command
from nvmeof.host.tcp_queue import TcpQueue
from nvmeof.limits import ADMIN_QUEUE_DEPTH, SHUTDOWN_TIMEOUT_S
from nvmeof.tcp.pdu import ADMIN_IN_CAPSULE_BYTES, NO_DIGESTS, Digests
from nvmeof.transport.base import Address, ControllerInfo
from nvmeof.transport.controller import Controller, opened
from nvmeof.transport.tcp_queue import MOST_BUFFERS
from nvmeof.transport.tcp_queue import connect_io_queue as connect_io_queue  # of the transport

ADMIN_DIGESTS = Digests(header=True, data=True)


class TcpAdminLink:
    """`controller.AdminLink` over a connected stream, which it owns.

    It asks for both digests, whatever those of I/O queues are, and does without where a controller has none.
    What a controller says of itself while it is brought up is believed for as long as the session lasts, and
    nothing else would tell that a bit of it was flipped on the way.

    It is not closed hard, as an I/O queue is (tcp_queue.py): nothing that it carries writes to a medium, and
    its end, which the kernel repeats until it is heard, has the controller end before its keep-alive time.
    """

    def __init__(self, address: Address, stream: trio.SocketStream, digests: Digests) -> None:
        self._address = address
        self._stream = stream
        self._socket = stream.socket
        self._digests = digests
        self._queue = TcpQueue(
            ADMIN_QUEUE_DEPTH - 1,
            digests=ADMIN_DIGESTS,
            in_capsule_bytes=ADMIN_IN_CAPSULE_BYTES,
            required=digests,
        )
        self._queue.start()

    @property
    def ready(self) -> bool:
        return self._queue.ready

    def submit(self, command: Command, now: float) -> None:
        self._queue.submit(command, now)

    async def send(self) -> None:
        try:
            while self._queue.output:
                count = await self._socket.sendmsg(self._queue.output[:MOST_BUFFERS])
                if self._queue.output:
                    self._queue.sent(count)
        except OSError as error:
            raise ConnectionLost(f"{self._address}: {error.strerror or error}") from error

    async def receive(self) -> list[Command]:
        try:
            count = await self._socket.recv_into(self._queue.next_buffer())
        except OSError as error:
            raise ConnectionLost(f"{self._address}: {error.strerror or error}") from error
        if count == 0:
            raise ConnectionLost(f"{self._address} closed the connection")
        try:
            return self._queue.received(count)
        except RemoteProtocolError as error:
            await self._complain(error)
            raise

    async def _complain(self, error: RemoteProtocolError) -> None:
        """Tell the controller what it did wrong, unless we are amid a PDU of ours."""
        request = self._queue.termination(error)
        if request is not None and not self._queue.output:
            with trio.move_on_after(SHUTDOWN_TIMEOUT_S), suppress(OSError):
                await self._socket.send(request)

    def fail(self, reason: str) -> list[Command]:
        return self._queue.fail(reason)

    def complete(self, info: ControllerInfo) -> ControllerInfo:
        return replace(info, transport="tcp", digests=self._digests)

    async def close(self) -> None:
        with suppress(trio.BrokenResourceError):
            await self._stream.aclose()


def _reason(error: OSError) -> str:
    """Why a connection failed: trio tells of its attempts in a group."""
    tried = error.__cause__
    first = tried.exceptions[0] if isinstance(tried, BaseExceptionGroup) else error
    code = first.errno if isinstance(first, OSError) else None
    return os.strerror(code) if code and code > 0 else str(first)


def open_controller(
    address: str, port: int, *names: Any, digests: Digests = NO_DIGESTS, **options: Any
) -> AbstractAsyncContextManager[Controller]:
    """See `controller.opened`, which takes the other arguments. `digests` are those of I/O queues."""

    async def connect(where: Address, _: float) -> TcpAdminLink:
        try:
            stream = await trio.open_tcp_stream(where.host, where.port)
        except OSError as error:
            raise ConnectionLost(f"cannot connect to {where}: {_reason(error)}") from error
        return TcpAdminLink(where, stream, digests)

    return opened(connect, address, port, *names, **options)
