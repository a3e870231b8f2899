"""How much a host's queue receives ahead of the place of a payload."""

from __future__ import annotations

import pytest

from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.tcp.pdu import CapsuleResp
from nvmeof.wire.cqe import Cqe
from tests.support.nvme.host_queue_rig import Rig


def reading(size: int) -> Command:
    return commands.read(1, 0, size // 4096, memoryview(bytearray(size)))


@pytest.mark.parametrize("way", ["answered", "abandoned", "failed"])
def test_little_is_read_ahead_while_a_long_answer_is_awaited(way: str) -> None:
    rig = Rig()
    rig.submit(reading(4096))
    assert not rig.queue._receiver.awaits_long
    command = reading(1 << 20)
    cid = rig.submit(command)
    assert rig.queue._receiver.awaits_long
    if way == "abandoned":
        rig.queue.abandon(command)
        assert rig.queue.oldest_abandoned() == 1.0
    assert rig.queue._receiver.awaits_long
    if way == "failed":
        rig.queue.fail("the cable")
        assert rig.queue.oldest_abandoned() is None
        return
    rig.say(CapsuleResp(Cqe(cid, status=2)))
    assert not rig.queue._receiver.awaits_long
    assert rig.queue.oldest_abandoned() is None
