"""rxe and the emulator over a cable that loses, doubles and reorders packets: both sides send again."""

from __future__ import annotations

import os

import pytest

from emulator.roce.runtime import Device
from tests.support.rdma_cable import KERNEL, OURS, RXE, Cable
from tests.support.verbs_end import VerbsEnd

ROUNDS = 12
PIECE = 30_000
AT_ONCE = 4
HALF = AT_ONCE * PIECE
RETRY = 14
"""67 ms until a packet is sent again."""


@pytest.mark.parametrize(
    "how",
    [("loss", "2%"), ("duplicate", "5%"), ("delay", "2ms", "reorder", "90%", "50%")],
    ids=["loss", "duplicates", "reordering"],
)
def test_everything_arrives_once_and_in_order(cable: Cable, far_nic: Device, how: tuple[str, ...]) -> None:
    with (
        VerbsEnd("pyverbs", RXE, KERNEL, 3 * HALF) as kernel,
        VerbsEnd("emulator.roce.pyverbs", far_nic.name, OURS, 3 * HALF) as ours,
    ):
        mtu = kernel.e.IBV_MTU_1024
        kernel.connect(ours, path_mtu=mtu, first_psn=1, expected_psn=2, timeout=RETRY)
        ours.connect(kernel, path_mtu=mtu, first_psn=2, expected_psn=1, timeout=RETRY)
        with cable.weather(*how):
            for number in range(ROUNDS):
                asking, asked = (kernel, ours) if number % 2 else (ours, kernel)
                exchange(asking, asked)


def exchange(asking: VerbsEnd, asked: VerbsEnd) -> None:
    """WRITEs, READs and SENDs under way at once; all of them compared."""
    mine, theirs = os.urandom(HALF), os.urandom(HALF)
    asking.memory.write(mine, HALF)
    asked.memory.write(theirs, HALF)
    e, key, address = asking.e, asked.memory.rkey, asked.memory.buf
    for at in range(0, HALF, PIECE):
        asked.receive(2 * HALF + at, PIECE)
        asking.post(e.IBV_WR_RDMA_WRITE, at, PIECE, remote=(key, address + HALF + at))
        asking.post(e.IBV_WR_RDMA_READ, HALF + at, PIECE, remote=(key, address + at))
        asking.post(e.IBV_WR_SEND, at, PIECE)
    asking.done(3 * AT_ONCE)
    received = asked.done(AT_ONCE)
    assert [each.byte_len for each in received] == [PIECE] * AT_ONCE
    assert asking.memory.read(HALF, HALF) == theirs
    assert asked.memory.read(2 * HALF, HALF) == 2 * mine
