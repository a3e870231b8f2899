"""KV namespaces over real sockets and emulated devices, and an enclosure that is killed and comes back."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from nvmeof.host import kv_commands
from nvmeof.host.command import Command
from nvmeof.transport import HostQueue, connect_io_queue
from nvmeof.transport.controller import Controller
from nvmeof.transport.tcp import open_controller
from nvmeof.wire.kv import decode_key_list_untrusted
from nvmeof.wire.status import Status
from tests.support.nvme.enclosure_process import EnclosureProcess
from tests.support.nvme.nvme_ends import HOST, HOST_ID, same
from tests.support.nvme.transport_ways import WAYS, Way

KEEP_ALIVE_S = 60.0
"""For longer than a test keeps trio from running."""
KV = 2
MIB = 1 << 20


def finish(queue: HostQueue, command: Command) -> Command:
    queue.submit(command)
    assert queue.wait(command, time.monotonic() + 20), command
    return command


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("registered", [True, False])
def test_values_over_every_transport(name: str, registered: bool) -> None:
    way = Way(name)
    settings = EnclosureSettings(
        drives=1, kv_drives=1, drive_bytes=16 * MIB, transports=way.transports, address=way.address
    )

    def use(controller: Controller) -> None:
        queue = connect_io_queue(controller.info, 1, 16, 10.0)
        try:
            buffer = memoryview(bytearray(2 * MIB))
            if registered:
                queue.register(buffer)
            for size in (1, 4096, 70_001, MIB + 4096):
                value = random.Random(size).randbytes(size)
                finish(queue, kv_commands.store(KV, b"key", [value[:100], value[100:]])).check()
                buffer[:] = b"\xee" * len(buffer)
                command = finish(queue, kv_commands.retrieve(KV, b"key", buffer[: MIB + 8192]))
                assert (command.status, command.result) == (0, size)
                assert same(buffer[:size], value)
                assert same(buffer[size : size + 100], b"\xee" * 100)
            assert finish(queue, kv_commands.retrieve(KV, b"no", buffer)).status == Status.KEY_NOT_FOUND
            listed = finish(queue, kv_commands.list_keys(KV, b"", buffer[:4096]))
            listed.check()
            assert decode_key_list_untrusted(buffer[:4096]) == [b"key"]
            assert finish(queue, kv_commands.delete(KV, b"key")).status == 0
        finally:
            queue.close()

    async def session(port: int, nqn: str) -> None:
        async with way.open_controller(port, nqn, HOST, HOST_ID, keep_alive_s=KEEP_ALIVE_S) as controller:
            kinds = [(each.nsid, each.kv is not None) for each in controller.namespaces()]
            assert kinds == [(1, False), (KV, True)]
            use(controller)  # blocks trio, as a test may

    with Enclosure(settings) as enclosure:
        trio.run(session, enclosure.port, enclosure.subsystem.nqn)


def test_a_killed_enclosure_has_every_value_that_it_acknowledged(tmp_path: Path) -> None:
    values = {b"key %d" % number: random.Random(number).randbytes(50_000) for number in range(20)}
    options = ["--drives=0", "--kv-drives=1", "--drive-size=16M", f"--folder={tmp_path / 'drives'}"]

    def store(queue: HostQueue) -> None:
        for key, value in values.items():
            finish(queue, kv_commands.store(1, key, [value])).check()

    def retrieve(queue: HostQueue) -> None:
        for key, value in values.items():
            into = memoryview(bytearray(len(value)))
            finish(queue, kv_commands.retrieve(1, key, into)).check()
            assert same(into, value)

    async def session(ready: dict[str, Any], use: Callable[[HostQueue], None]) -> None:
        async with open_controller(
            ready["address"], ready["port"], ready["nqn"], HOST, HOST_ID, keep_alive_s=KEEP_ALIVE_S
        ) as controller:
            queue = connect_io_queue(controller.info, 1, 16, 10.0)
            try:
                use(queue)
            finally:
                queue.close()

    for use in (store, retrieve):
        with EnclosureProcess.start(options, tmp_path) as enclosure:
            trio.run(session, enclosure.ready, use)
            enclosure.kill()
