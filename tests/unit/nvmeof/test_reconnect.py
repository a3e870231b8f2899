"""The reconnect policy: at once, then ever slower, and not for ever."""

from __future__ import annotations

import socket

import pytest
import trio

from nvmeof.errors import ConnectionLost, ConnectRefused
from nvmeof.transport.reconnect import History, ReconnectPolicy, next_try
from nvmeof.transport.tcp import open_controller

POLICY = ReconnectPolicy(first_s=0.1, most_s=5.0, loss_s=600.0)
LOST = ConnectionLost("gone")
USELESS = ConnectRefused("no", retry_is_useless=True)
BUSY = ConnectRefused("busy", retry_is_useless=False)


def test_back_off() -> None:
    delays = [next_try(POLICY, History(0.0, n, True, LOST), 1.0) for n in range(9)]
    assert delays == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert next_try(POLICY, History(0.0, 100_000, True, LOST), 1.0) == 5.0


def test_a_try_that_hung_has_had_its_pause() -> None:
    hung = History(0.0, 5, True, LOST, tried_at=97.5)
    assert next_try(POLICY, hung, 98.0) == 1.6 - 0.5
    assert next_try(POLICY, hung, 100.0) == 0.0


def test_the_controller_is_lost_after_the_time_for_it() -> None:
    assert next_try(POLICY, History(100.0, 50, True, LOST), 698.0) == 2.0
    assert next_try(POLICY, History(100.0, 50, True, LOST), 700.0) is None
    assert next_try(POLICY, History(100.0, 0, True, LOST), 700.0) is None


def test_refusals() -> None:
    assert next_try(POLICY, History(0.0, 1, False, USELESS), 1.0) is None
    assert next_try(POLICY, History(0.0, 1, True, USELESS), 1.0) == 0.1
    assert next_try(POLICY, History(0.0, 1, False, BUSY), 1.0) == 0.1


def test_a_connection_that_is_refused_is_said_to_be() -> None:
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        port = nobody_listens.getsockname()[1]

        async def connect() -> None:
            async with open_controller(
                "127.0.0.1", port, "nqn.2026-01.io.g35:a", "nqn.2026-01.io.g35:b", bytes(16)
            ):
                pass

        with pytest.raises(ConnectionLost, match=rf"cannot connect to 127.0.0.1:{port}: Connection refused$"):
            trio.run(connect)
