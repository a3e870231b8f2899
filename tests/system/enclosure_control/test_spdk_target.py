"""The same against `g35 jbof` as a process, and a real SPDK target: G35_SPDK_TARGET is its command line.

    G35_SPDK_TARGET="/opt/spdk/bin/nvmf_tgt --no-huge -s 512 -m 0x1" pytest tests/system/enclosure_control

The option for the RPC socket is added. Neither Debian nor PyPI has such a target; without one its answers
are judged as they were recorded (tests/vectors/spdk_rpc.json).
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path

import pytest
import trio

from agent.enclosure_control.apply import apply
from agent.enclosure_control.description import parse_description
from agent.enclosure_control.rpc_errors import RpcError, RpcUnreachable
from agent.enclosure_control.rpc_target import RpcTarget
from nvmeof.transport.tcp import open_controller
from tests.support.nvme.nvme_ends import HOST, HOST_ID
from tests.support.processes import Processes
from tests.support.waiting import wait_until

COMMAND = os.environ.get("G35_SPDK_TARGET", "")
OURS = f"{shlex.quote(sys.executable)} -P -m agent.cli jbof"
NO_TARGET = "no SPDK target: build one and name its command line in G35_SPDK_TARGET (docs/enclosures.md)"
NQN = "nqn.2026-01.io.g35:spdk"


@pytest.mark.parametrize(
    ("command", "option"),
    [
        pytest.param(OURS, "--rpc", id="ours"),
        pytest.param(COMMAND, "-r", id="spdk", marks=pytest.mark.skipif(not COMMAND, reason=NO_TARGET)),
    ],
)
def test_apply_to_a_target(processes: Processes, tmp_path: Path, command: str, option: str) -> None:
    rpc = tmp_path / "rpc"
    processes.start([*shlex.split(command), option, rpc])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    document = {
        "transports": [{"type": "tcp"}],
        "malloc": [{"name": "Malloc0", "size": "16M"}],
        "subsystems": [
            {
                "nqn": NQN,
                "serial": "G35",
                "namespaces": [{"nsid": 1, "bdev": "Malloc0", "nguid": "35" * 16}],
                "listeners": [{"address": "127.0.0.1", "port": port}],
                "hosts": [{"nqn": HOST}],
            }
        ],
    }
    target = RpcTarget.at(rpc, 20.0)

    def answers() -> bool:
        try:
            target.read()
        except (RpcError, RpcUnreachable):
            return False
        return True

    async def look() -> None:
        async with open_controller("127.0.0.1", port, NQN, HOST, HOST_ID) as controller:
            assert [each.nguid.hex() for each in controller.namespaces() if each.nguid] == ["35" * 16]

    try:
        wait_until(answers, 60, "the target's RPC")
        assert apply(target, parse_description(document, "test")).done
        assert apply(target, parse_description(document, "test")).done == ()
        trio.run(look)
        assert [each.name for each in target.stats()] == ["Malloc0"]
        assert apply(target, parse_description({}, "test"), prune=True).done
    finally:
        target.close()
