"""Strangers without a secret who want all that an enclosure has: hosts with a secret still get in."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from emulator.jbof import rdma_listener
from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from nvmeof.authentication.secret import Credentials, new_secret
from nvmeof.controller.settings import ControllerSettings
from nvmeof.tcp.pdu import CapsuleCmd, ICReq
from nvmeof.transport import connect_io_queue
from nvmeof.transport.tcp import open_controller
from nvmeof.wire.fabrics import DISCOVERY_NQN, Connect, ConnectData
from tests.support.nvme.enclosure_process import EnclosureProcess
from tests.support.nvme.entries import fabrics_entry, in_capsule
from tests.support.nvme.nvme_ends import HOST, HOST_ID
from tests.support.nvme.pdus import encode_pdu
from tests.support.nvme.transport_ways import Way
from tests.support.waiting import wait_until

MOST = 1100
"""Connections of strangers; an enclosure serves 1,024."""
STRANGERS = ("127.0.0.2", "127.0.0.3")
PATIENCE_S = 20.0
RIGHT = Credentials(new_secret())


def connect_capsule(subsystem: str) -> bytes:
    data = ConnectData(HOST_ID, 0xFFFF, subsystem, HOST).encode()
    sqe = fabrics_entry(Connect(0, 31, 600_000), cid=1)._replace(sgl=in_capsule(len(data)))
    return b"".join(encode_pdu(CapsuleCmd(sqe, len(data)), data=(data,)))


ICREQ = b"".join(encode_pdu(ICReq()))
BREAKING = "break the protocol"
"""Such connections the enclosure ends by itself, so there need not be many at any time."""
FIRST_WORDS: dict[str, Callable[[str], list[bytes]]] = {
    "say nothing": lambda nqn: [],
    "initialize and say nothing": lambda nqn: [ICREQ],
    "hold discovery controllers": lambda nqn: [ICREQ, connect_capsule(DISCOVERY_NQN)],
    "take the name of a host": lambda nqn: [ICREQ, connect_capsule(nqn)],
    BREAKING: lambda nqn: [ICREQ, ICREQ],
}
"""What they say, each when the one before has been answered."""


class Flood:
    """A stranger who opens connections, says some words on each, and keeps them as long as he can."""

    def __init__(self, port: int, words: list[bytes]) -> None:
        self.opened = 0
        self._port, self._words = port, words
        self._over = threading.Event()
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._open, daemon=True)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for sock in self._sockets:
            sock.close()

    def _open(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError):
                source = STRANGERS[self.opened % len(STRANGERS)]
                sock = socket.create_connection(("127.0.0.1", self._port), 5, (source, 0))
                self._sockets.append(sock)
                for number, words in enumerate(self._words):
                    if number:
                        sock.recv(1 << 16)
                    sock.sendall(words)
            self.opened += 1
            if len(self._sockets) > MOST:
                self._sockets.pop(0).close()


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Room for all these sockets in this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def enclosure(tmp_path: Path) -> Iterator[EnclosureProcess]:
    secrets = tmp_path / "hosts"
    secrets.touch(0o600)
    secrets.write_text(f"{HOST} {RIGHT.host_secret.text()}\n")
    arguments = ["--drive-size", "16M", "--host-secret-file", str(secrets)]
    served = EnclosureProcess.start(arguments, tmp_path)
    yield served
    served.stop()


def get_in(served: EnclosureProcess) -> float:
    """Seconds until a host with the secret has its admin queue and an I/O queue."""
    ready = served.ready

    async def main() -> float:
        began = time.monotonic()
        async with open_controller(
            "127.0.0.1",
            ready["port"],
            ready["nqn"],
            HOST,
            HOST_ID,
            credentials=RIGHT,
            connect_timeout_s=PATIENCE_S,
        ) as controller:
            connect_io_queue(controller.info, 1, 8, PATIENCE_S).close()
            return time.monotonic() - began

    return trio.run(main)


def held(served: EnclosureProcess) -> int:
    """Connections and guests."""
    stats = served.ask("stats")
    return int(stats["connections"]) + int(stats["guests"]["now"])


@pytest.mark.parametrize("way", FIRST_WORDS)
def test_a_host_with_a_secret_gets_in_while_strangers(
    way: str, enclosure: EnclosureProcess, descriptors: None
) -> None:
    with Flood(enclosure.ready["port"], FIRST_WORDS[way](enclosure.ready["nqn"])) as flood:
        wait_until(lambda: flood.opened >= MOST, 120, "the strangers to come")
        for _ in range(3):
            assert get_in(enclosure) < PATIENCE_S
    if way != BREAKING:
        stats = enclosure.ask("stats")
        assert stats["guests"]["displaced"] + stats["guests"]["refused"] > 0
    wait_until(lambda: not held(enclosure), 60, "the strangers to be gone")
    get_in(enclosure)


# --- over RDMA --------------------------------------------------------------------------------------------


def small(way: Way, **bounds: int) -> Enclosure:
    return Enclosure(
        EnclosureSettings(
            drive_bytes=1 << 20,
            transports=way.transports,
            address=way.address,
            credentials={HOST: RIGHT},
            controller=ControllerSettings(**bounds),
        )
    )


def strangers_first(served: Enclosure, way: Way, count: int) -> None:
    """Discovery controllers until there is no room, then a host with the secret."""

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(count):
                opening = way.open_controller(served.port, DISCOVERY_NQN, HOST, HOST_ID)
                await stack.enter_async_context(opening)
            assert len(served.target.guests) == count
            await trio.sleep(1.0)  # the time that each of them has
            opening = way.open_controller(
                served.port, served.settings.subsystem_nqn, HOST, HOST_ID, credentials=RIGHT
            )
            async with opening as controller:
                connect_io_queue(controller.info, 1, 8, PATIENCE_S).close()
            assert served.target.guests.displaced >= 1

    trio.run(main)


def test_over_rdma_guests_give_way_too() -> None:
    way = Way("rdma")
    with small(way, max_guests=3) as served:
        strangers_first(served, way, 3)


@pytest.mark.interpreted
def test_over_rdma_guests_give_their_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way("rdma")
    # Room for the queue pairs of two discovery controllers and half of one.
    monkeypatch.setattr(rdma_listener, "COMPLETIONS", 300)
    with small(way) as served:
        strangers_first(served, way, 2)
