"""What systemd hears of the agent, over a socket as systemd would bind it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.host_os import systemd_notify
from agent.host_os.systemd_notify import ALIVE, READY, notify, watchdog_seconds


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "notify"))
        bound.settimeout(5)
        yield bound


def test_one_message_carries_all_lines(manager: socket.socket) -> None:
    assert notify(READY, "STATUS=serving /mnt", environment={"NOTIFY_SOCKET": manager.getsockname()})
    assert manager.recv(4096) == b"READY=1\nSTATUS=serving /mnt"


def test_a_socket_of_the_abstract_name_space() -> None:
    name = f"g35-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(f"\0{name}")
        assert notify(ALIVE, environment={"NOTIFY_SOCKET": f"@{name}"})
        assert bound.recv(4096) == b"WATCHDOG=1"


def test_without_systemd_nothing_is_sent() -> None:
    assert not notify(READY, environment={})


@pytest.mark.expects_log("systemd was not told READY=1: No such file")
def test_a_manager_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    assert not notify(READY, environment={"NOTIFY_SOCKET": str(tmp_path / "gone")})


@pytest.mark.expects_log("systemd was not told WATCHDOG=1: .*unavailable")
def test_a_manager_that_does_not_read_stops_nobody(manager: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": manager.getsockname()}
    for _ in range(100_000):
        if not notify(ALIVE, environment=environment):
            return
    pytest.fail("the socket never filled up")


@pytest.mark.expects_log("NOTIFY_SOCKET is 'vsock:2:1234'")
def test_a_kind_of_address_that_is_not_known_is_said() -> None:
    assert not notify(READY, environment={"NOTIFY_SOCKET": "vsock:2:1234"})


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_how_often_the_watchdog_is_fed(environment: dict[str, str], seconds: float | None) -> None:
    assert watchdog_seconds(environment) == seconds


def test_the_words_are_those_of_the_manual() -> None:
    assert (systemd_notify.READY, systemd_notify.STOPPING, systemd_notify.ALIVE) == (
        "READY=1",
        "STOPPING=1",
        "WATCHDOG=1",
    )
