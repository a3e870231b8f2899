"""An agent's sessions and queues to an enclosure that wants authentication, with real files."""

from __future__ import annotations

import json
import logging
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from agent.cli.key_verb import make_dhchap
from agent.config.configuration import EnclosureSection, FabricSection
from agent.remote.supervisor import Supervisor, secret_finder
from emulator.jbof.control_client import ask
from nvmeof.authentication.secret import new_secret
from nvmeof.host import commands
from nvmeof.transport import VerbsChoice, connect_io_queue, rdma_queue
from nvmeof.transport.base import ControllerInfo
from nvmeof.transport.verbs_provider import free_loopback_address
from tests.support.nvme.transport_ways import EMULATED
from tests.support.processes import Processes
from tests.support.waiting import LATE_SESSION, wait_until

pytestmark = pytest.mark.expects_log(LATE_SESSION)

HOST, HOST_ID = "nqn.2026-01.io.g35:tester", b"tester-host-id-0"
LBA = 4096


class Shelf:
    """`g35 jbof` as a process, and the files of secrets beside it."""

    def __init__(self, folder: Path, processes: Processes, transport: str, *options: str) -> None:
        self.folder = folder
        for name in ("host", "own", "other"):
            make_dhchap(folder / name)
        hosts = folder / "hosts"
        hosts.touch(0o600)
        hosts.write_text(f"{HOST} {self.text('host')} {self.text('own')}\n")
        self.control = folder / "control"
        self.address = "127.0.0.1" if transport == "tcp" else free_loopback_address()
        self.process = processes.python(
            *("-m", "emulator.jbof", "--drive-size", "1M", "--control", self.control, "--verbose"),
            *("--transport", transport, "--address", self.address, "--host-secret-file", hosts),
            *options,
        )
        self.ready = json.loads(self.process.wait_for_line("ready ", 60).removeprefix("ready "))
        self.section = EnclosureSection(
            name="shelf",
            transport=transport,  # type: ignore[arg-type]
            address=self.address,
            port=self.ready["port"],
            nqn=self.ready["nqn"],
        )

    def text(self, name: str) -> str:
        return (self.folder / name).read_text().strip()

    def secrets(self, host: str, own: str | None) -> FabricSection:
        return FabricSection(
            host_secret_file=self.folder / host,
            controller_secret_file=None if own is None else self.folder / own,
        )

    @property
    def tally(self) -> dict[str, Any]:
        found: dict[str, Any] = ask(self.control, "stats")["authentication"]
        return found

    def shows_no_secret(self) -> None:
        """Neither in what the process was started with, nor in what it said."""
        said = Path(f"/proc/{self.process.pid}/cmdline").read_bytes() + self.process.log.read_bytes()
        for name in ("host", "own", "other"):
            assert self.text(name).split(":")[2].encode() not in said


def supervised(shelf: Shelf, fabric: FabricSection, use: Callable[[Supervisor], Any]) -> None:
    """`use` here, beside a supervisor on a thread that has tried once."""
    supervisor = Supervisor([shelf.section], HOST, HOST_ID, 2, VerbsChoice(EMULATED), secret_finder(fabric))
    tried, stop = threading.Event(), trio.Event()
    token: list[trio.lowlevel.TrioToken] = []

    async def main() -> None:
        token.append(trio.lowlevel.current_trio_token())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            await supervisor.all_tried(10)
            tried.set()
            await stop.wait()
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    try:
        assert tried.wait(60)
        use(supervisor)
    finally:
        token[0].run_sync_soon(stop.set)
        thread.join(60)


def session_of(supervisor: Supervisor) -> ControllerInfo:
    [ours] = supervisor.fabric.enclosures
    return wait_until(lambda: ours.session, 60, f"the session: {ours.fault}")  # type: ignore[return-value]


def write_and_read(supervisor: Supervisor) -> None:
    session = session_of(supervisor)
    queue = connect_io_queue(session, 1, 8)
    try:
        into = memoryview(mmap.mmap(-1, LBA))
        for command in (commands.write(1, 0, 1, [b"\x35" * LBA]), commands.read(1, 0, 1, into)):
            queue.submit(command)
            assert queue.wait(command, time.monotonic() + 20)
            command.check()
        assert into == b"\x35" * LBA
    finally:
        queue.close()


@pytest.mark.parametrize("transport", ["tcp", "rdma"])
def test_both_prove_themselves_with_secrets_from_files(
    transport: str, tmp_path: Path, processes: Processes
) -> None:
    shelf = Shelf(tmp_path, processes, transport, "--dhchap-hash", "sha384", "--dhchap-group", "ffdhe2048")
    supervised(shelf, shelf.secrets("host", "own"), write_and_read)
    assert (shelf.tally["succeeded"], shelf.tally["failed"]) == (2, 0)
    shelf.shows_no_secret()


def test_a_queue_pair_that_was_broken_proves_itself_anew(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Giving up a command over RDMA connects the queue again, and that is authenticated like the first."""
    monkeypatch.setattr(rdma_queue, "RECONNECT_S", 20.0)  # half a second is short for a busy machine
    shelf = Shelf(tmp_path, processes, "rdma")

    def break_it(supervisor: Supervisor) -> None:
        session = session_of(supervisor)
        queue = connect_io_queue(session, 1, 8)
        try:
            into = memoryview(mmap.mmap(-1, LBA))
            queue.register(into)
            ask(shelf.control, "hang", drive=0)
            given_up = commands.read(1, 0, 1, into)
            queue.submit(given_up)
            queue.abandon(given_up)
            assert queue.needs_reconnect
            ask(shelf.control, "heal", drive=0)
            queue.reconnect()
            again = commands.read(1, 0, 1, into)
            queue.submit(again)
            assert queue.wait(again, time.monotonic() + 20)
            again.check()
        finally:
            queue.close()

    supervised(shelf, shelf.secrets("host", "own"), break_it)
    assert (shelf.tally["succeeded"], shelf.tally["failed"]) == (3, 0)


@pytest.mark.expects_log("not connected, and tried again")
@pytest.mark.parametrize(
    ("host", "own", "said"),
    [
        ("other", None, "does not accept the secret"),
        ("host", "other", "could not prove itself"),
        ("missing", None, "cannot open"),
    ],
)
def test_a_wrong_secret_is_said_once_and_tried_slowly(
    host: str, own: str | None, said: str, tmp_path: Path, processes: Processes, caplog: Any
) -> None:
    """And mended without a new start: the file is read anew for every try."""
    caplog.set_level(logging.DEBUG)
    shelf = Shelf(tmp_path, processes, "tcp")

    def until_it_fits(supervisor: Supervisor) -> None:
        [ours] = supervisor.fabric.enclosures
        assert said in ours.fault
        if host != "missing":
            since, failed = time.monotonic(), ours.authentication_failures
            assert failed >= 1
            wait_until(lambda: ours.authentication_failures >= failed + 2, 60, "two more tries")
            # 0.2 s after the first failure, of which some may be over; then 0.4 s, and ever longer.
            assert time.monotonic() - since >= 0.4
            wait_until(lambda: shelf.tally["failed"] >= 3, 60, "the enclosure to have counted them")
            assert HOST in shelf.tally["last_failure"]
        wrong = shelf.folder / (host if host != "host" else "other")
        wrong.touch(0o600)
        wrong.write_text(shelf.text("own" if host == "host" else "host"))
        wait_until(lambda: ours.session is not None, 60, "the session")

    supervised(shelf, shelf.secrets(host, own), until_it_fits)
    told = [line for line in caplog.messages if "not connected, and tried again" in line]
    assert len(told) == 1
    for name in ("host", "own"):
        assert not [line for line in caplog.messages if shelf.text(name).split(":")[2] in line]


@pytest.mark.expects_log("not connected, and tried again")
def test_an_agent_without_a_secret_is_told_so(tmp_path: Path, processes: Processes) -> None:
    shelf = Shelf(tmp_path, processes, "tcp")

    def look(supervisor: Supervisor) -> None:
        assert "no secret for it (host_secret_file)" in supervisor.fabric.enclosures[0].fault

    supervised(shelf, FabricSection.model_validate({}), look)


def test_the_enclosures_own_files_go_before_the_fabrics(tmp_path: Path) -> None:
    for name in ("one", "two", "own"):
        make_dhchap(tmp_path / name)
    find = secret_finder(
        FabricSection(host_secret_file=tmp_path / "one", controller_secret_file=tmp_path / "own")
    )
    fields: dict[str, Any] = {"name": "a", "address": "127.0.0.1", "nqn": "nqn.a"}
    plain = find(EnclosureSection(**fields))
    chosen = find(EnclosureSection(**fields, host_secret_file=tmp_path / "two"))
    assert plain is not None
    assert chosen is not None
    assert plain.controller_secret is not None
    assert chosen.controller_secret is None
    assert not chosen.host_secret.same_as(plain.host_secret)


@pytest.mark.parametrize(
    "options",
    [
        ("--dhchap-group", "null"),
        ("--host-secret-file", "EXPOSED"),
        ("--host-secret-file", "HOSTS", "--allow-host", "nqn.another"),
        ("--host-secret-file", "HOSTS", "--dhchap-hash", "md5"),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: tuple[str, ...], tmp_path: Path, processes: Processes
) -> None:
    for name, mode in (("EXPOSED", 0o644), ("HOSTS", 0o600)):
        (tmp_path / name).write_text(f"{HOST} {new_secret().text()}\n")
        (tmp_path / name).chmod(mode)
    words = [str(tmp_path / word) if word in ("EXPOSED", "HOSTS") else word for word in options]
    process = processes.python("-m", "emulator.jbof", *words)
    assert process.process.wait(60) == 2
    assert "DHHC" not in process.log.read_text()
