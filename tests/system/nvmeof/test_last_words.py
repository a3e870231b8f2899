"""A controller that says its last words and hangs up: they are heard, however late somebody listens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import trio

from nvmeof.authentication.secret import Credentials, new_secret
from nvmeof.errors import AuthenticationFailed
from nvmeof.host.command import Command
from nvmeof.transport.rdma import RdmaAdminLink
from nvmeof.transport.verbs_waiting import Completions
from tests.support.nvme.asking_enclosure import PATIENCE_S, AskingEnclosure, join_queue
from tests.support.nvme.transport_ways import Way
from tests.support.waiting import wait_until

RIGHT, WRONG = Credentials(new_secret()), Credentials(new_secret())

pytestmark = [pytest.mark.interpreted, pytest.mark.expects_log("authentication failed")]


@pytest.fixture
def way() -> Way:
    return Way("rdma")


@pytest.fixture
def enclosure(way: Way) -> Iterator[AskingEnclosure]:
    with AskingEnclosure(way, RIGHT) as asking:
        yield asking


def test_of_a_controller_that_is_brought_up(
    enclosure: AskingEnclosure, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, submit = RdmaAdminLink._wait, RdmaAdminLink.submit
    asked: list[Command] = []

    def noted(link: RdmaAdminLink, command: Command, now: float) -> None:
        asked.extend([command] * (command.name == "authentication receive"))
        submit(link, command, now)

    async def late(*descriptors: int) -> None:
        """For the verdict, which is asked for last, it is listened only when the end is there too."""
        if len(asked) < 2:
            await at_once(*descriptors)
        else:
            await trio.lowlevel.wait_readable(descriptors[-1])

    monkeypatch.setattr(RdmaAdminLink, "submit", noted)
    monkeypatch.setattr(RdmaAdminLink, "_wait", staticmethod(late))

    async def main() -> None:
        async with enclosure.open_controller(WRONG, connect_timeout_s=PATIENCE_S):
            pytest.fail("it came up")

    with pytest.raises(AuthenticationFailed, match="does not accept the secret"):
        trio.run(main)


def test_of_a_queue_that_joins(enclosure: AskingEnclosure, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, here = Completions.wait, threading.current_thread()

    def late(queue: Completions, deadline: float, also: Callable[[], object] = lambda: False) -> None:
        at_once(queue, deadline, also)
        # The enclosure waits by the same text, on a thread of its own.
        if threading.current_thread() is here and enclosure.served.target.authentications.failed:
            wait_until(also, PATIENCE_S, "the end of the connection")

    monkeypatch.setattr(Completions, "wait", late)

    async def main() -> None:
        async with enclosure.open_controller(RIGHT) as controller:
            join_queue(controller, WRONG)

    with pytest.raises(AuthenticationFailed, match="does not accept the secret"):
        trio.run(main)
