"""`g35 enclosure` against `g35 jbof --rpc`: a bare enclosure becomes what a file describes."""

from __future__ import annotations

import json
import random
import socket
import stat
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from agent.enclosure_control.apply import ApplyFailed, apply, planned
from agent.enclosure_control.description import Description, parse_description
from agent.enclosure_control.rpc_errors import RpcError
from agent.enclosure_control.rpc_target import RpcTarget
from agent.enclosure_control.steps import AddListener, AddNamespace, CreateSubsystem
from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from emulator.jbof.rpc.server import CLIENTS_MAX, RpcServer
from host_shim.pool import Pool
from nvmeof.errors import ConnectRefused
from nvmeof.transport.base import VerbsChoice
from nvmeof.transport.tcp import Controller, open_controller
from nvmeof.transport.verbs_provider import free_loopback_address
from tests.support.needs import needs_mount
from tests.support.nvme.nvme_ends import HOST, HOST_ID
from tests.support.nvme.transport_ways import EMULATED, discover
from tests.support.pool_up import wait_each_served
from tests.support.processes import Processes
from tests.support.verbs_here import status_of
from tests.support.waiting import wait_until

NQN = "nqn.2026-01.io.g35:shelf-1"
NGUIDS = ("11" * 16, "22" * 16)


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def enclosure() -> Iterator[Enclosure]:
    with Enclosure(EnclosureSettings(bare=True)) as served:
        yield served


@pytest.fixture
def target(enclosure: Enclosure, tmp_path: Path) -> Iterator[RpcTarget]:
    server = RpcServer(enclosure, tmp_path / "rpc")
    made = RpcTarget.at(tmp_path / "rpc", 20.0)
    try:
        yield made
    finally:
        made.close()
        server.close()


def described(port: int, address: str = "127.0.0.1", transport: str = "tcp", **subsystem: Any) -> Description:
    listener = {"transport": transport, "address": address, "port": port}
    whole = {"nqn": NQN, "serial": "S1", "listeners": [listener], "hosts": [{"nqn": HOST}]} | subsystem
    whole.setdefault("namespaces", [{"nsid": 1, "bdev": "Malloc0", "nguid": NGUIDS[0]}])
    return parse_description(
        {
            "transports": [{"type": transport}],
            "malloc": [{"name": "Malloc0", "size": "1M"}, {"name": "Malloc1", "size": "1M"}],
            "subsystems": [whole],
        },
        "test",
    )


async def connected(port: int, host: str = HOST) -> Controller:
    """The controller that a host got; ConnectRefused if it was not let in."""
    async with open_controller("127.0.0.1", port, NQN, host, HOST_ID) as controller:
        return controller


def test_apply_makes_it_so_and_a_second_one_does_nothing(enclosure: Enclosure, target: RpcTarget) -> None:
    port = free_port()
    wanted = described(port)
    assert len(apply(target, wanted).done) == 7
    assert apply(target, wanted).done == ()

    async def look() -> None:
        controller = await connected(port)
        assert [(each.nsid, each.nguid) for each in controller.namespaces()] == [
            (1, bytes.fromhex(NGUIDS[0]))
        ]
        [entry] = await discover("127.0.0.1", port, HOST, HOST_ID)
        assert (entry.subsystem_nqn, entry.service) == (NQN, str(port))
        assert await discover("127.0.0.1", port, "nqn.2026-01.io.g35:stranger", HOST_ID) == []
        with pytest.raises(ConnectRefused):
            await connected(port, "nqn.2026-01.io.g35:stranger")

    trio.run(look)
    stranger = [{"nqn": HOST}, {"nqn": "nqn.2026-01.io.g35:stranger"}]
    changed = described(port, hosts=stranger)
    assert len(apply(target, changed).done) == 1
    trio.run(connected, port, "nqn.2026-01.io.g35:stranger")
    assert [each.name for each in target.stats()] == ["Malloc0", "Malloc1"]


def test_a_connected_host_sees_namespaces_come_and_go(enclosure: Enclosure, target: RpcTarget) -> None:
    port = free_port()
    apply(target, described(port))
    two = described(
        port,
        namespaces=[
            {"nsid": number, "bdev": f"Malloc{number - 1}", "nguid": NGUIDS[number - 1]} for number in (1, 2)
        ],
    )

    async def watch() -> None:
        async with open_controller("127.0.0.1", port, NQN, HOST, HOST_ID) as controller:

            async def told(expected: list[int]) -> None:
                while [each.nsid for each in controller.namespaces()] != expected:
                    await controller.events.receive()

            with trio.fail_after(20):
                apply(target, two)  # it blocks the loop, which a test may
                await told([1, 2])
                assert apply(target, described(port)).left_alone[0] == f"namespace 2 of {NQN}"
                apply(target, described(port), prune=True)
                await told([1])
                # A host that is let in no more is put out.
                apply(target, described(port, hosts=[]), prune=True)
                await controller.ended.wait()

    trio.run(watch)


def test_a_step_that_is_refused_leaves_the_rest_for_the_next_time(
    enclosure: Enclosure, target: RpcTarget
) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with taken, pytest.raises(ApplyFailed, match="6 steps done, 1 not") as caught:
        apply(target, described(port))
    assert isinstance(caught.value.failed, AddListener)
    assert isinstance(caught.value.error, RpcError)
    assert caught.value.error.code == -32602
    assert [type(step) for step in caught.value.done][3:5] == [CreateSubsystem, AddNamespace]
    assert [type(step) for step in planned(target, described(port)).steps] == [AddListener]
    assert len(apply(target, described(port)).done) == 1


def test_listeners_come_and_go(enclosure: Enclosure, target: RpcTarget) -> None:
    one, two = free_port(), free_port()
    apply(target, described(one))
    apply(target, described(two), prune=True)
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", one), 5):
        pass
    trio.run(connected, two)
    target.client.call("nvmf_delete_subsystem", {"nqn": NQN})
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", two), 5):
        pass


def test_over_rdma(enclosure: Enclosure, target: RpcTarget) -> None:
    address = free_loopback_address()
    wanted = described(4420, address, "rdma")
    apply(target, wanted)
    assert apply(target, wanted).done == ()

    async def look() -> None:
        [entry] = await discover(address, 4420, HOST, HOST_ID, verbs=VerbsChoice(EMULATED))
        assert (entry.subsystem_nqn, entry.address) == (NQN, address)

    trio.run(look)


def test_the_socket_is_its_owners_and_clients_are_bounded(
    enclosure: Enclosure, target: RpcTarget, tmp_path: Path
) -> None:
    assert stat.S_IMODE((tmp_path / "rpc").stat().st_mode) == 0o600
    clients = [socket.socket(socket.AF_UNIX) for _ in range(CLIENTS_MAX + 1)]
    try:
        for client in clients:
            client.settimeout(20)
            client.connect(str(tmp_path / "rpc"))
        for client in clients[:-1]:
            client.sendall(b'{"id":1,"method":"nvmf_get_transports"}')
            assert client.recv(4096) == b'{"jsonrpc":"2.0","id":1,"result":[]}\n'
        assert clients[-1].recv(1) == b""
        # What is not JSON ends a connection without a word, and its place is free again.
        clients[0].sendall(b"{bad json}")
        assert clients[0].recv(1) == b""
    finally:
        for client in clients:
            client.close()

    def answered() -> bool:
        try:
            return bool(target.client.call("nvmf_get_transports") == [])
        except OSError:
            return False
        except Exception:
            return False

    wait_until(answered, 20, "a free place")


def test_the_verbs_say_what_was_done_and_what_was_not(
    enclosure: Enclosure, target: RpcTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    file = tmp_path / "shelf.toml"
    file.write_text(
        f'[[transports]]\ntype = "tcp"\n[[malloc]]\nname = "M"\nsize = "1M"\n[[subsystems]]\nnqn = "{NQN}"\n'
        f'[[subsystems.listeners]]\naddress = "127.0.0.1"\nport = {taken.getsockname()[1]}\n'
        '[[subsystems.listeners]]\naddress = "127.0.0.1"\nport = 1\n'
    )

    def g35(*words: str | Path) -> tuple[object, str, str]:
        code = status_of("enclosure", *map(str, words), "--rpc", str(tmp_path / "rpc"))
        return code, *capsys.readouterr()

    with taken:
        code, said, error = g35("apply", file)
    assert code == 1
    assert said.splitlines() == [
        "done: create transport TCP",
        "done: create malloc bdev M of 1 MiB",
        f"done: create subsystem {NQN}",
        f"failed: {NQN}: listen at TCP 127.0.0.1:{taken_port(file)}",
        f"not begun: {NQN}: listen at TCP 127.0.0.1:1",
    ]
    assert "Invalid parameters (code -32602)" in error
    assert "hint: " in error
    code, said, _ = g35("diff", file, "--json")
    assert code == 3
    assert [each["call"].split()[0] for each in json.loads(said)["steps"]] == 2 * [
        "nvmf_subsystem_add_listener"
    ]
    file.write_text("")
    _, said, _ = g35("diff", file)
    assert said.splitlines() == [
        f"left alone, not described: subsystem {NQN}", "left alone, not described: malloc bdev M",
        "as described",
    ]  # fmt: skip
    _, said, _ = g35("show")
    assert f"subsystem {NQN}, serial 0" in said
    assert "transport TCP: in_capsule_data_size" in said
    assert "keys: none" in said
    _, said, _ = g35("stats")
    assert "Bdevs since they were made" in said
    # A description of nothing is more likely a wrong file than the wish to remove all.
    assert g35("apply", file, "--prune")[:2] == (1, "")
    file.write_text('[[transports]]\ntype = "tcp"\n')
    assert g35("apply", file, "--prune")[:2] == (
        0, f"done: delete subsystem {NQN}\ndone: delete malloc bdev M\n2 steps\n",
    )  # fmt: skip


def taken_port(file: Path) -> int:
    """The first listener's port."""
    described = tomllib.loads(file.read_text())
    port: int = described["subsystems"][0]["listeners"][0]["port"]
    return port


CONFIG = """
[agent]
mount = "{folder}/mnt"
state = "{folder}/agent"
key_file = "{folder}/root.key"
workers = 2
read_deadline_ms = 5000

[fabric]
host_secret_file = "{folder}/host.key"
controller_secret_file = "{folder}/shelf.key"

[[enclosures]]
name = "shelf"
address = "127.0.0.1"
port = {port}
nqn = "{nqn}"

[[volumes]]
name = "kv"
value_size = "64K"
share = 1.0
"""

DESCRIPTION = """
[[transports]]
type = "tcp"
in_capsule_data_size = "1056K"

[[keys]]
name = "host"
file = "{folder}/host.key"

[[keys]]
name = "shelf"
file = "{folder}/shelf.key"

[[malloc]]
name = "Malloc0"
size = "64M"

[[aio]]
name = "Aio0"
file = "{folder}/drive"

[[subsystems]]
nqn = "{nqn}"
serial = "SHELF1"

[[subsystems.namespaces]]
nsid = 1
bdev = "Malloc0"
nguid = "11111111111111111111111111111111"

[[subsystems.namespaces]]
nsid = 2
bdev = "Aio0"
nguid = "22222222222222222222222222222222"

[[subsystems.listeners]]
address = "127.0.0.1"
port = {port}

[[subsystems.hosts]]
nqn = "{host}"
key = "host"
controller_key = "shelf"
"""


@needs_mount
def test_a_bare_enclosure_is_provisioned_and_serves_a_pool(
    processes: Processes, tmp_path: Path, seed: int
) -> None:
    """With keys both ways: the agent proves itself to the enclosure and the enclosure to the agent."""
    host_id = uuid.UUID(bytes=HOST_ID)
    values = {
        "folder": tmp_path, "port": free_port(), "nqn": NQN,
        "host": f"nqn.2014-08.org.nvmexpress:uuid:{host_id}",
    }  # fmt: skip
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/host_id").write_text(f"{host_id}\n")
    with (tmp_path / "drive").open("wb") as drive:
        drive.truncate(64 << 20)
    config, description = tmp_path / "agent.toml", tmp_path / "shelf.toml"
    config.write_text(CONFIG.format(**values))
    description.write_text(DESCRIPTION.format(**values))
    rpc = tmp_path / "rpc"
    processes.g35("jbof", "--rpc", rpc).wait_for_line("ready")

    def run(*words: str | Path, status: int = 0) -> str:
        done = processes.g35(*words)
        assert done.process.wait(60) == status, done.output
        return done.output

    for name in ("host.key", "shelf.key"):
        run("key", "make-dhchap", tmp_path / name)
    run("key", "new", tmp_path / "root.key")
    dry = run("enclosure", "apply", description, "--rpc", rpc, "--dry-run")
    assert dry.count("\n") == 10
    assert "DHHC-1" not in dry
    assert json.loads(run("enclosure", "show", "--rpc", rpc, "--json"))["subsystems"] == []
    assert run("enclosure", "diff", description, "--rpc", rpc, status=3).count("+ ") == 10
    assert run("enclosure", "apply", description, "--rpc", rpc).endswith("10 steps\n")
    assert run("enclosure", "apply", description, "--rpc", rpc) == "nothing to do\n"
    assert run("enclosure", "diff", description, "--rpc", rpc) == "as described\n"
    run("pool", "format", "--config", config)
    agent = processes.g35("agent", "--config", config)
    agent.wait_for_line("ready", 60)
    dice = random.Random(seed)
    stored = {dice.randbytes(16): dice.randbytes(dice.randrange(1, 65536)) for _ in range(40)}
    with Pool(tmp_path / "mnt") as pool:
        kv = pool.volume("kv")
        assert kv.put_many(list(stored), list(stored.values())) == [True] * len(stored)
        wait_each_served(kv, stored)
    counted = json.loads(run("enclosure", "stats", "--rpc", rpc, "--json"))
    assert {each["name"] for each in counted if each["write_bytes"]} == {"Malloc0", "Aio0"}
    assert agent.stop() == 0
