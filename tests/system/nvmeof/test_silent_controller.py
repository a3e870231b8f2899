"""A controller that falls silent amid an authentication: what is known of it by then is what is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
import trio.testing

from nvmeof.authentication.secret import Credentials, new_secret
from nvmeof.controller import fabrics_commands
from nvmeof.controller.request import Outcome, Request
from nvmeof.errors import AuthenticationFailed, ConnectionLost
from nvmeof.host.command import Command
from nvmeof.transport.rdma_queue import RdmaHostQueue
from nvmeof.transport.tcp_queue import TcpHostQueue
from nvmeof.wire.authentication import Failure, decode_host_message_untrusted
from tests.support.nvme.asking_enclosure import PATIENCE_S, AskingEnclosure, join_queue
from tests.support.nvme.transport_ways import Way

HOSTS, CONTROLLERS = new_secret(), new_secret()
RIGHT = Credentials(HOSTS, CONTROLLERS)
UNPROVEN = Credentials(HOSTS, new_secret())
"""The controller cannot prove itself to who has these."""

pytestmark = pytest.mark.interpreted

CASES = pytest.mark.parametrize(
    ("credentials", "error", "said"),
    [
        # Whoever tries again goes by the verdict: a secret that is wrong stays wrong.
        (UNPROVEN, AuthenticationFailed, "could not prove itself"),
        (RIGHT, ConnectionLost, "amid the authentication"),
    ],
    ids=["at-our-farewell", "before-there-is-a-verdict"],
)


def is_farewell(message: Any) -> bool:
    return isinstance(decode_host_message_untrusted(message), Failure)


@pytest.fixture(params=["tcp", "rdma"])
def way(request: pytest.FixtureRequest) -> Way:
    return Way(request.param)


@pytest.fixture
def enclosure(way: Way) -> Iterator[AskingEnclosure]:
    with AskingEnclosure(way, RIGHT) as asking:
        yield asking


def fall_silent(monkeypatch: pytest.MonkeyPatch, credentials: Credentials, then: Callable[[], None]) -> None:
    """Leave a farewell unanswered, or where there will be none who asks for a message; `then` is called."""
    execute = fabrics_commands.execute_authentication

    def or_not(request: Request, *rest: Any) -> Outcome:
        sent = request.window
        if (sent is None) if credentials is RIGHT else (sent is not None and is_farewell(sent)):
            then()
            return Outcome.PARKED
        return execute(request, *rest)

    monkeypatch.setattr(fabrics_commands, "execute_authentication", or_not)


@CASES
def test_while_the_controller_is_brought_up(
    enclosure: AskingEnclosure,
    monkeypatch: pytest.MonkeyPatch,
    credentials: Credentials,
    error: type[Exception],
    said: str,
) -> None:
    clock = trio.testing.MockClock()  # stands still until the controller falls silent

    async def main() -> None:
        token = trio.lowlevel.current_trio_token()
        fall_silent(monkeypatch, credentials, lambda: token.run_sync_soon(clock.jump, PATIENCE_S))
        async with enclosure.open_controller(credentials, connect_timeout_s=PATIENCE_S):
            pytest.fail("it came up")

    with pytest.raises(error, match=said):
        trio.run(main, clock=clock)


@pytest.mark.expects_log("authentication failed")
@CASES
def test_while_a_queue_joins(
    way: Way,
    enclosure: AskingEnclosure,
    monkeypatch: pytest.MonkeyPatch,
    credentials: Credentials,
    error: type[Exception],
    said: str,
) -> None:
    """For its thread the time is over as soon as it would wait for what is not answered."""
    kind: Any = RdmaHostQueue if way.is_rdma else TcpHostQueue
    wait = kind.wait

    def or_not(queue: Any, command: Command, deadline: float, at_least: int | None = None) -> bool:
        if command.name == "authentication receive":
            silent = credentials is RIGHT
        else:
            silent = command.name == "authentication send" and is_farewell(b"".join(command.data_out))
        return False if silent else wait(queue, command, deadline, at_least)

    async def main() -> None:
        async with enclosure.open_controller(RIGHT) as controller:
            monkeypatch.setattr(kind, "wait", or_not)
            join_queue(controller, credentials)

    with pytest.raises(error, match=said):
        trio.run(main)
