"""The whole path over IPv6: an enclosure at ::1, its pool, its agent, values through the mount."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path

from host_shim.pool import Pool
from tests.support.needs import needs_ipv6, needs_mount
from tests.support.processes import Processes
from tests.support.waiting import wait_until

pytestmark = [needs_mount, needs_ipv6]

CONFIG = """
[agent]
mount = "{folder}/mnt"
state = "{folder}/agent"
key_file = "{folder}/root.key"
workers = 2
read_deadline_ms = 2000
metrics = "[::1]:{metrics_port}"

[[enclosures]]
name = "six"
address = "::1"
port = {port}
nqn = "{nqn}"

[[volumes]]
name = "kv"
value_size = "64K"
share = 1.0
"""


def _free_port() -> int:
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_put_and_get_through_an_enclosure_at_an_ipv6_address(
    processes: Processes, tmp_path: Path, seed: int
) -> None:
    ready_file = tmp_path / "ready.json"
    words = ("--drives", "2", "--drive-size", "64M", "--ready-file", ready_file)
    enclosure = processes.g35("jbof", "--address", "::1", *words)
    enclosure.wait_for_line("ready")
    ready = json.loads(ready_file.read_text())
    assert ready["address"] == "::1"
    config = tmp_path / "agent.toml"
    metrics_port = _free_port()
    config.write_text(
        CONFIG.format(folder=tmp_path, port=ready["port"], nqn=ready["nqn"], metrics_port=metrics_port)
    )
    for verb in (("key", "new", tmp_path / "root.key"), ("pool", "format", "--config", config)):
        done = processes.g35(*verb)
        assert done.process.wait(60) == 0, done.output
    agent = processes.g35("agent", "--config", config)
    agent.wait_for_line("ready", 60)
    dice = random.Random(seed)
    values = {dice.randbytes(16): dice.randbytes(dice.randrange(1, 65536)) for _ in range(30)}
    with Pool(tmp_path / "mnt") as pool:
        kv = pool.volume("kv")
        assert kv.put_many(list(values), list(values.values())) == [True] * len(values)
        assert [kv.get(key) for key in values] == list(values.values())
    with socket.create_connection(("::1", metrics_port), timeout=10) as scrape:
        scrape.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        received = b""
        while block := scrape.recv(65536):
            received += block
    assert b'g35_enclosure_up{enclosure="six"} 1.0' in received
    # The enclosure dies and comes back at its address and port: the session is made anew over IPv6 too.
    enclosure.kill()
    again = processes.g35("jbof", "--address", "::1", "--port", str(ready["port"]), *words)
    again.wait_for_line("ready")

    def connected() -> bool:
        status = json.loads((tmp_path / "mnt/.g35/status.json").read_text())
        return bool(status["enclosures"][0]["connected"] and status["enclosures"][0]["reconnects"])

    wait_until(connected, 30, "the agent to be connected again")
    assert agent.stop() == 0
