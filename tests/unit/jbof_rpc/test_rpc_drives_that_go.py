"""Bdevs that go, and drives that are pulled out of an enclosure whose namespaces come and go by RPC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from emulator.jbof import retired
from emulator.jbof.control import answer
from emulator.jbof.drive import Drive
from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from emulator.jbof.rdma_listener import RdmaListener
from emulator.jbof.rpc.dispatch import Dispatcher
from tests.support.waiting import wait_until

NQN = "nqn.2026-01.io.g35:known"
NGUID = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


@pytest.fixture
def enclosure() -> Iterator[Enclosure]:
    with Enclosure(EnclosureSettings(bare=True)) as made:
        yield made


@pytest.fixture
def dispatcher(enclosure: Enclosure) -> Dispatcher:
    made = Dispatcher(enclosure)
    call(made, "nvmf_create_subsystem", {"nqn": NQN})
    return made


def call(dispatcher: Dispatcher, method: str, params: dict[str, Any] | None = None) -> Any:
    said = dispatcher.answer({"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}})
    assert isinstance(said, dict)
    return said["result"] if "result" in said else said["error"]


def ask(enclosure: Enclosure, **request: Any) -> dict[str, Any]:
    reply, _ = answer(enclosure, json.dumps(request).encode())
    return reply


def make(dispatcher: Dispatcher, nsid: int | None = None) -> str:
    name: str = call(dispatcher, "bdev_malloc_create", {"block_size": 4096, "num_blocks": 8})
    if nsid is not None:
        space = {"bdev_name": name, "nsid": nsid, "nguid": NGUID}
        assert call(dispatcher, "nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": space}) == nsid
    return name


def test_memory_of_a_deleted_bdev_is_given_back_by_itself(
    enclosure: Enclosure, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retired, "RETIRE_S", 0.01)
    closed: list[int] = []
    close = Drive.close

    def counted(drive: Drive) -> None:
        closed.append(drive.number)
        close(drive)

    monkeypatch.setattr(Drive, "close", counted)
    for _ in range(2):  # the thread ends when none waits, and comes again
        call(dispatcher, "bdev_malloc_delete", {"name": make(dispatcher)})
        wait_until(lambda: closed == [0], 10, "the memory is given back")
        closed.clear()


def test_those_that_wait_are_bounded(
    enclosure: Enclosure, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retired, "RETIRE_S", 0.01)
    monkeypatch.setattr(retired, "RETIRED_MAX", 2)
    most = 0
    for _ in range(20):
        call(dispatcher, "bdev_malloc_delete", {"name": make(dispatcher)})
        most = max(most, len(enclosure._retired))
    assert 1 <= most <= 2


class Registered(RdmaListener):
    """One that listens nowhere and notes what it was told to hold."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def add_medium(self, view: memoryview) -> None:
        self.held.append(len(view))

    def remove_medium(self, view: memoryview) -> None:
        self.held.remove(len(view))

    def close(self) -> None:
        pass


def test_an_rdma_listener_lets_go_of_a_bdev_that_went(
    enclosure: Enclosure, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retired, "RETIRE_S", 0.01)
    listener = enclosure._listeners["rdma", "127.0.0.1", 4420] = Registered()
    name = make(dispatcher)
    assert listener.held == [32768]
    call(dispatcher, "bdev_malloc_delete", {"name": name})
    wait_until(lambda: listener.held == [], 10, "the window is let go of")


def test_a_drive_is_told_by_what_hosts_see_of_it(enclosure: Enclosure, dispatcher: Dispatcher) -> None:
    make(dispatcher)
    make(dispatcher, 7)
    [never, served] = ask(enclosure, verb="stats")["drives"]
    assert (never["drive"], never["nsid"]) == (0, None)
    seen = {"drive": 1, "nsid": 7, "nguid": NGUID}
    assert served.items() >= seen.items()
    ask(enclosure, verb="remove", drive=1)
    assert ask(enclosure, verb="stats")["drives"][1].items() >= seen.items()
    assert ask(enclosure, verb="add", drive=1) == {"ok": True} | seen


def test_a_drive_whose_place_was_taken_comes_back_when_it_is_free(
    enclosure: Enclosure, dispatcher: Dispatcher
) -> None:
    make(dispatcher, 1)
    ask(enclosure, verb="remove", drive=0)
    other = {"bdev_name": make(dispatcher), "nsid": 1}
    assert call(dispatcher, "nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": other}) == 1
    for _ in range(2):
        assert "is on another drive now" in ask(enclosure, verb="add", drive=0)["error"]
    assert call(dispatcher, "nvmf_subsystem_remove_ns", {"nqn": NQN, "nsid": 1}) is True
    assert ask(enclosure, verb="add", drive=0)["ok"]
    [_, subsystem] = call(dispatcher, "nvmf_get_subsystems")
    assert [each["bdev_name"] for each in subsystem["namespaces"]] == ["Malloc0"]


def test_a_drive_without_a_place_is_not_said_to_be_added(
    enclosure: Enclosure, dispatcher: Dispatcher
) -> None:
    make(dispatcher)
    assert "not pulled out" in ask(enclosure, verb="add", drive=0)["error"]
    make(dispatcher, 1)
    ask(enclosure, verb="remove", drive=1)
    call(dispatcher, "nvmf_delete_subsystem", {"nqn": NQN})
    assert "not pulled out" in ask(enclosure, verb="add", drive=1)["error"]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("nvmf_create_subsystem", {"nqn": "nqn.more", "max_namespaces": 1025}),
        ("nvmf_create_subsystem", {"nqn": "nqn.more\0"}),
        ("nvmf_subsystem_add_host", {"nqn": NQN, "host": "nqn.h\0"}),
        ("nvmf_subsystem_add_host", {"nqn": NQN, "host": "nqn.é"}),
        *(
            ("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": place | {"trsvcid": port}})
            for place in [{"trtype": "TCP", "traddr": "127.0.0.1"}]
            for port in ("+14502", " 14503 ", "1_4504", "1４502")
        ),
    ],
)
def test_what_was_taken_for_something_else_is_refused(
    dispatcher: Dispatcher, method: str, params: dict[str, Any]
) -> None:
    call(dispatcher, "nvmf_create_transport", {"trtype": "TCP"})
    assert call(dispatcher, method, params)["code"] < 0


def test_a_namespace_of_keys_and_values_is_not_shown() -> None:
    made = Enclosure(EnclosureSettings(drives=1, kv_drives=1, drive_bytes=1 << 20))
    try:
        [_, shown] = call(Dispatcher(made), "nvmf_get_subsystems")
        assert [each["nsid"] for each in shown["namespaces"]] == [1]
    finally:
        made.close()
