"""Unreliable connections of the kernel's rxe with those of the emulator, either one asking."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.lab.rdma_cable import KERNEL, OURS, RXE, Cable, far_device
from tests.support.roce.verbs_end import VerbsEnd

LARGEST = 1 << 17
TRIES = 20
SIZES = (1, 2, 3, 1023, 1024, 1025, 4097, 20_000, LARGEST)


@pytest.fixture(params=["kernel-asks", "we-ask"])
def ends(request: pytest.FixtureRequest, cable: Cable) -> Iterator[tuple[VerbsEnd, VerbsEnd]]:
    """Who asks and who is asked, connected; both sides' PSNs wrap on the way."""
    cable.set_mtu(1500)
    try:
        with (
            far_device() as device,
            VerbsEnd("pyverbs", RXE, KERNEL, LARGEST, "UC") as kernel,
            VerbsEnd("emulator.roce.pyverbs", device.name, OURS, LARGEST, "UC") as ours,
        ):
            mtu = kernel.e.IBV_MTU_1024
            kernel.connect(ours, path_mtu=mtu, first_psn=0xFFFFF0, expected_psn=0xFFFFFA)
            ours.connect(kernel, path_mtu=mtu, first_psn=0xFFFFFA, expected_psn=0xFFFFF0)
            yield (kernel, ours) if request.param == "kernel-asks" else (ours, kernel)
    finally:
        cable.set_mtu()


def test_messages_with_and_without_immediate_data(ends: tuple[VerbsEnd, VerbsEnd]) -> None:
    asking, asked = ends
    for size in SIZES:
        content = os.urandom(size)
        asking.memory.write(content, size)
        for opcode in (asking.e.IBV_WR_SEND, asking.e.IBV_WR_SEND_WITH_IMM):
            asked.receive(0, LARGEST)
            asking.post(opcode, 0, size, immediate=0x01020304)
            asking.done()
            (received,) = asked.done()
            assert received.byte_len == size
            with_immediate = opcode == asking.e.IBV_WR_SEND_WITH_IMM
            assert bool(received.wc_flags & asked.e.IBV_WC_WITH_IMM) == with_immediate
            assert not with_immediate or received.imm_data == 0x01020304
            assert asked.memory.read(size, 0) == content


def test_writes_and_the_word_behind_them(ends: tuple[VerbsEnd, VerbsEnd]) -> None:
    asking, asked = ends
    e, remote = asking.e, (asked.memory.rkey, asked.memory.buf)
    for size in SIZES:
        content = os.urandom(size)
        asking.memory.write(content, size)
        asked.receive(0, LARGEST)
        asking.post(e.IBV_WR_RDMA_WRITE, 0, size, remote=(remote[0], remote[1] + LARGEST - size))
        asking.post(e.IBV_WR_RDMA_WRITE_WITH_IMM, 0, size, immediate=7, remote=remote)
        asking.done(2)
        (received,) = asked.done()
        assert (received.byte_len, received.imm_data) == (size, 7)
        assert asked.memory.read(size, 0) == content
        if 2 * size <= LARGEST:
            assert asked.memory.read(size, LARGEST - size) == content


def test_what_finds_no_receive_is_lost_and_the_next_message_arrives(ends: tuple[VerbsEnd, VerbsEnd]) -> None:
    asking, asked = ends
    for _ in range(TRIES):
        asking.memory.write(b"lost" * 1000, 4000)
        asking.post(asking.e.IBV_WR_SEND, 0, 4000)
        asking.done()
        assert asked.poll() is None
        asked.receive(0, LARGEST)
        asking.memory.write(b"next", 4)
        asking.post(asking.e.IBV_WR_SEND, 0, 4)
        asking.done()
        (received,) = asked.done()
        if received.byte_len == 4:
            break
        # Nothing tells when a message of UC has come: this one was so late that it found the receive.
    assert (received.byte_len, asked.memory.read(4, 0)) == (4, b"next")
