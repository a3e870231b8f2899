"""Who may use the control socket of an enclosure: its owner and root, by mode and by peer credentials."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from emulator.jbof import client_server
from emulator.jbof.client_server import ClientServer, peer_user


class Echo(ClientServer):
    def converse(self, client: socket.socket) -> None:
        client.sendall(client.recv(100))


def answer_at(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(10)
        client.connect(str(path))
        try:
            client.sendall(b"hello")
            return client.recv(100)
        except (BrokenPipeError, ConnectionResetError):
            return b""


@pytest.fixture
def echo(tmp_path: Path) -> Echo:
    return Echo("echo", tmp_path / "socket", 4)


@pytest.mark.expects_log("user 12345 may not use it")
def test_only_its_owner_and_root_may_use_the_control_socket(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        assert stat.S_IMODE(echo.path.stat().st_mode) == 0o600
        assert answer_at(echo.path) == b"hello"
        for user, answer in ((12345, b""), (0, b"hello"), (os.geteuid(), b"hello")):
            monkeypatch.setattr(client_server, "peer_user", lambda _, user=user: user)
            assert answer_at(echo.path) == answer
    finally:
        echo.close()


def test_the_kernel_says_who_connected() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        assert peer_user(one) == os.geteuid()


@pytest.mark.expects_log("a client is disconnected: can't start new thread")
def test_a_client_for_whom_there_is_no_thread_costs_no_more_than_itself(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    start = threading.Thread.start
    try:
        for _ in range(6):  # more than there are slots
            monkeypatch.setattr(threading.Thread, "start", no_thread)
            assert answer_at(echo.path) == b""
            monkeypatch.setattr(threading.Thread, "start", start)
            assert answer_at(echo.path) == b"hello"
    finally:
        echo.close()
