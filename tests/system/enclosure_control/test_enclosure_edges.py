"""Enclosure control where the world does not play along: no descriptors, no readers, odd names, bad keys."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from spdk.rpc.client import JSONRPCClient, JSONRPCException

from agent.enclosure_control.apply import ApplyFailed, apply, planned
from agent.enclosure_control.description import Description, parse_description
from agent.enclosure_control.plan import PlanConflict
from agent.enclosure_control.rpc_target import RpcTarget
from agent.errors import UserError
from emulator.jbof import retired
from emulator.jbof.control import ControlServer
from emulator.jbof.control_client import ask
from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from emulator.jbof.rdma_listener import RdmaListener
from emulator.jbof.rpc import server as rpc_server
from emulator.jbof.rpc.server import RpcServer
from nvmeof.authentication.secret import DhchapSecret
from nvmeof.authentication.secret_files import write_secret_file
from nvmeof.transport.verbs_provider import free_loopback_address
from tests.support.nvme.enclosure_process import EnclosureProcess
from tests.support.verbs_here import status_of
from tests.support.waiting import wait_until

NQN = "nqn.2026-01.io.g35:shelf-1"
HOST = "nqn.2026-01.io.g35:host-1"


@pytest.fixture
def enclosure() -> Iterator[Enclosure]:
    with Enclosure(EnclosureSettings(bare=True)) as served:
        yield served


@pytest.fixture
def server(enclosure: Enclosure, tmp_path: Path) -> Iterator[RpcServer]:
    made = RpcServer(enclosure, tmp_path / "rpc")
    yield made
    made.close()


@pytest.fixture
def target(server: RpcServer) -> Iterator[RpcTarget]:
    made = RpcTarget.at(server.path, 20.0)
    yield made
    made.close()


class OutOfDescriptors:
    """A listening socket that cannot accept once."""

    def __init__(self, real: socket.socket) -> None:
        self.real = real
        self.refused = 0

    def accept(self) -> Any:
        if not self.refused:
            self.refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.real.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def test_a_socket_survives_a_moment_without_descriptors(
    enclosure: Enclosure, server: RpcServer, tmp_path: Path, expects_log: Callable[..., None]
) -> None:
    expects_log("accept: .*Too many open files")
    control = ControlServer(enclosure, tmp_path / "control")
    try:
        for each in (server, control):
            each._listener = OutOfDescriptors(each._listener)  # type: ignore[assignment]
        # The first is taken by the accept that was waiting, the second after the failure.
        for _ in range(2):
            ask(tmp_path / "control", "stats")
            made = RpcTarget.at(server.path, 20.0)
            assert made.client.call("nvmf_get_transports") == []
            made.close()
    finally:
        control.close()


def test_memory_of_a_deleted_bdev_leaves_the_rdma_device(
    enclosure: Enclosure, target: RpcTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retired, "RETIRE_S", 0.01)
    place = {"transport": "rdma", "address": free_loopback_address()}
    whole = {"transports": [{"type": "rdma"}], "subsystems": [{"nqn": NQN, "listeners": [place]}]}
    without = parse_description(whole, "test")
    with_memory = parse_description(whole | {"malloc": [{"name": "M", "size": "1M"}]}, "test")
    apply(target, without)
    [listener] = enclosure._listeners.values()
    assert isinstance(listener, RdmaListener)
    for _ in range(3):
        apply(target, with_memory)
        wait_until(lambda: len(listener._buffers._regions) == 1, 10, "the memory is known to the device")
        apply(target, without, prune=True)
        wait_until(lambda: not listener._buffers._regions, 10, "the memory is given back")


def with_key(file: Path) -> Description:
    return parse_description(
        {
            "keys": [{"name": "k", "file": str(file)}],
            "subsystems": [{"nqn": NQN, "hosts": [{"nqn": HOST, "key": "k"}]}],
        },
        "test",
    )


def test_a_key_is_exchanged_or_nothing_is(enclosure: Enclosure, target: RpcTarget, tmp_path: Path) -> None:
    old, new = DhchapSecret(b"o" * 32), DhchapSecret(b"n" * 32)
    write_secret_file(tmp_path / "old", old)
    apply(target, with_key(tmp_path / "old"))
    [subsystem] = enclosure.target.subsystems

    def valid() -> str:
        return subsystem.credentials[HOST].host_secret.text()

    # A file that holds no secret is found out before the first step: SPDK takes it, and locks the host out.
    (tmp_path / "new").write_text("no secret")
    (tmp_path / "new").chmod(0o600)
    with pytest.raises(UserError, match=r"key k: .*new: a DH-HMAC-CHAP secret is.*nothing was changed"):
        apply(target, with_key(tmp_path / "new"))
    assert valid() == old.text()
    # So is one that others may read.
    (tmp_path / "new").write_text(new.text())
    (tmp_path / "new").chmod(0o644)
    with pytest.raises(UserError, match="can be read by others"):
        apply(target, with_key(tmp_path / "new"))
    assert valid() == old.text()
    # One that is not there is refused by the enclosure: the old key stands, the next run begins again.
    (tmp_path / "new").unlink()
    for _ in range(2):
        with pytest.raises(ApplyFailed):
            apply(target, with_key(tmp_path / "new"))
        assert valid() == old.text()
        assert planned(target, with_key(tmp_path / "new")).steps
    write_secret_file(tmp_path / "new", new)
    apply(target, with_key(tmp_path / "new"))
    assert valid() == new.text()
    assert planned(target, with_key(tmp_path / "new"), prune=True).steps == ()
    # Somebody forgot the key by hand.
    target.client.call("keyring_file_remove_key", {"name": "k"})
    apply(target, with_key(tmp_path / "old"))
    assert valid() == old.text()


def test_a_key_file_without_a_secret_locks_its_host_out_as_at_a_real_target(
    enclosure: Enclosure, target: RpcTarget, tmp_path: Path
) -> None:
    file = tmp_path / "empty"
    file.touch(mode=0o600)
    target.client.call("nvmf_create_subsystem", {"nqn": NQN})
    target.client.call("keyring_file_add_key", {"name": "k", "path": str(file)})
    assert target.client.call("nvmf_subsystem_add_host", {"nqn": NQN, "host": HOST, "dhchap_key": "k"})
    [subsystem] = enclosure.target.subsystems
    assert HOST in subsystem.credentials, "nobody comes in without a secret"
    [key] = target.read().keys
    assert (key.name, key.users) == ("k", 1)


def test_what_this_enclosure_lacks_is_said_before_anything_is_done(target: RpcTarget) -> None:
    ssd = {"name": "N", "address": "0000:3b:00.0"}
    wanted = parse_description({"transports": [{"type": "tcp"}], "nvme": [ssd]}, "test")
    with pytest.raises(UserError, match="bdev_nvme_attach_controller; nothing was changed"):
        apply(target, wanted)
    assert target.read().transports == ()
    absent = {"nqn": NQN, "namespaces": [{"nsid": 40, "bdev": "X"}], "listeners": [{"address": "::1"}]}
    with pytest.raises(PlanConflict, match=r"up to 32.*no bdev X.*no transport TCP"):
        apply(target, parse_description({"subsystems": [absent]}, "test"))


def g35(*words: str, rpc: Path) -> None:
    """A verb that succeeds."""
    assert status_of("enclosure", *words, "--rpc", str(rpc)) == 0


def test_an_enclosure_of_this_machine_is_known_as_one(tmp_path: Path) -> None:
    with EnclosureProcess.start(["--rpc", str(tmp_path / "rpc")], tmp_path) as served:
        target = RpcTarget.at(Path(served.ready["rpc"]), 20.0)
        wanted = parse_description({"keys": [{"name": "k", "file": str(tmp_path / "none")}]}, "test")
        with pytest.raises(UserError, match="key k: there is no file"):
            planned(target, wanted)
        target.close()


def test_spdks_own_client_is_answered(server: RpcServer) -> None:
    with JSONRPCClient(str(server.path), timeout=20.0) as client:
        asked = {"name": "M", "block_size": 512, "num_blocks": 8}
        assert client.call("bdev_malloc_create", dict(asked)) == "M"
        assert [each["name"] for each in client.call("bdev_get_bdevs")] == ["M"]
        with pytest.raises(JSONRPCException) as refused:
            client.call("bdev_malloc_create", dict(asked))
        assert "-17" in refused.value.message


def test_sizes_are_shown_in_binary_units(
    server: RpcServer, target: RpcTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    target.client.call("bdev_malloc_create", {"name": "M", "block_size": 4096, "num_blocks": 24})
    target.client.call("nvmf_create_transport", {"trtype": "TCP", "in_capsule_data_size": 8192})
    g35("show", rpc=server.path)
    said = capsys.readouterr().out
    assert "96 KiB" in said
    assert "in_capsule_data_size 8 KiB" in said


def test_names_are_shown_as_they_are(
    server: RpcServer, target: RpcTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("[/x]", "\x1b[31mred"):
        target.client.call("bdev_malloc_create", {"name": name, "block_size": 512, "num_blocks": 8})
    target.client.call("nvmf_create_transport", {"trtype": "TCP"})
    target.client.call("nvmf_create_subsystem", {"nqn": NQN, "model_number": "a [b] c"})
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        port = str(probe.getsockname()[1])
    place = {"trtype": "TCP", "adrfam": "IPv6", "traddr": "::1", "trsvcid": port}
    target.client.call("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": place})
    g35("show", rpc=server.path)
    g35("stats", rpc=server.path)
    said = capsys.readouterr().out
    assert said.count("[/x]") == 2
    assert "model a [b] c" in said
    assert f"TCP [::1]:{port}" in said
    assert r"\x1b[31mred" in said
    assert "\x1b[31mred" not in said


class NobodyReads(io.StringIO):
    """A pipe whose other end was closed."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def write(self, _text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def fileno(self) -> int:
        return self._fd


def test_apply_goes_on_when_nobody_reads_what_it_says(
    server: RpcServer, target: RpcTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shelf.toml").write_text(
        '[[malloc]]\nname = "A"\nsize = "1M"\n[[malloc]]\nname = "B"\nsize = "1M"\n'
    )
    fd = os.open(os.devnull, os.O_WRONLY)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", NobodyReads(fd))
            g35("apply", str(tmp_path / "shelf.toml"), rpc=server.path)
    finally:
        os.close(fd)
    assert [each.name for each in target.read().bdevs] == ["A", "B"]


def test_the_example_of_the_document_works(
    server: RpcServer, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (repository / "docs/enclosures.md").read_text()
    example = page.partition("This one works")[2].split("```")[1]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert example.count("port = 4420") == 1
    (tmp_path / "shelf.toml").write_text(example.replace("port = 4420", f"port = {port}"))
    g35("apply", str(tmp_path / "shelf.toml"), rpc=server.path)
    g35("diff", str(tmp_path / "shelf.toml"), "--json", rpc=server.path)
    assert json.loads(capsys.readouterr().out.partition("5 steps\n")[2]) == {"steps": [], "left_alone": []}
    # The other example is a description too, for an enclosure that has such an SSD.
    first = page.partition("## The file")[2].split("```")[1]
    parse_description(tomllib.loads(first), "docs/enclosures.md")


def test_silent_clients_do_not_keep_others_out(
    server: RpcServer, target: RpcTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_server, "SILENT_S", 0.0)
    clients = [socket.socket(socket.AF_UNIX) for _ in range(rpc_server.CLIENTS_MAX)]
    try:
        for number, client in enumerate(clients, 1):
            client.settimeout(20)
            client.connect(str(server.path))
            # Each has a thread of its own: without a wait a later one might be heard first.
            wait_until(lambda taken=number: len(server._heard) == taken, 10, "each is taken in turn")
        assert target.client.call("nvmf_get_transports") == []
        assert clients[0].recv(1) == b"", "the one that was silent longest"
    finally:
        for client in clients:
            client.close()
