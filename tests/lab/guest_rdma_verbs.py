"""Queue pairs of the kernel's rxe (Debian's pyverbs) against those of the emulator, either one asking."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.lab.rdma_cable import KERNEL, OURS, RXE, Cable, far_device
from tests.support.roce.verbs_end import VerbsEnd

LARGEST = 1 << 20
SIZES = (1, 2, 3, 4, 255, 1023, 1024, 1025, 4096, 4097, 65_535, 65_536, LARGEST)
KERNELS_FIRST_PSN, OUR_FIRST_PSN = 0xFFFFF0, 0xFFFFFA
"""Both sides' PSNs wrap on the way."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Who asks, and who is asked."""

    asking: VerbsEnd
    asked: VerbsEnd

    def write(self, content: bytes) -> None:
        self.asking.memory.write(content, len(content))

    @property
    def remote(self) -> tuple[int, int]:
        return self.asked.memory.rkey, self.asked.memory.buf


@pytest.fixture(scope="module", params=[1024, 4096], ids=["mtu-1024", "mtu-4096"])
def both(request: pytest.FixtureRequest, cable: Cable) -> Iterator[tuple[VerbsEnd, VerbsEnd]]:
    """The kernel's end and ours, connected."""
    cable.set_mtu(1500 if request.param == 1024 else 4200)
    try:
        with (
            far_device() as device,
            VerbsEnd("pyverbs", RXE, KERNEL, LARGEST) as kernel,
            VerbsEnd("emulator.roce.pyverbs", device.name, OURS, LARGEST) as ours,
        ):
            connect(kernel, ours, request.param)
            yield kernel, ours
    finally:
        cable.set_mtu()


def connect(kernel: VerbsEnd, ours: VerbsEnd, mtu: int) -> None:
    path_mtu = kernel.e.IBV_MTU_1024 if mtu == 1024 else kernel.e.IBV_MTU_4096
    psns = (KERNELS_FIRST_PSN, OUR_FIRST_PSN)
    kernel.connect(ours, path_mtu=path_mtu, first_psn=psns[0], expected_psn=psns[1])
    ours.connect(kernel, path_mtu=path_mtu, first_psn=psns[1], expected_psn=psns[0])


@pytest.fixture(params=["kernel-asks", "we-ask"])
def ends(request: pytest.FixtureRequest, both: tuple[VerbsEnd, VerbsEnd]) -> Ends:
    kernel, ours = both
    return Ends(kernel, ours) if request.param == "kernel-asks" else Ends(ours, kernel)


def test_sends(ends: Ends) -> None:
    for size in SIZES:
        content = os.urandom(size)
        ends.write(content)
        ends.asked.receive(0, LARGEST)
        ends.asking.post(ends.asking.e.IBV_WR_SEND, 0, size)
        ends.asking.done()
        (received,) = ends.asked.done()
        assert received.byte_len == size
        assert ends.asked.memory.read(size, 0) == content


def test_sends_with_immediate_data(ends: Ends) -> None:
    for size in (1, 1025, 10_000):
        content = os.urandom(size)
        ends.write(content)
        ends.asked.receive(0, LARGEST)
        ends.asking.post(ends.asking.e.IBV_WR_SEND_WITH_IMM, 0, size, immediate=0x01020304)
        ends.asking.done()
        (received,) = ends.asked.done()
        assert (received.byte_len, received.imm_data) == (size, 0x01020304)
        assert received.wc_flags & ends.asked.e.IBV_WC_WITH_IMM
        assert ends.asked.memory.read(size, 0) == content


def test_writes(ends: Ends) -> None:
    key, address = ends.remote
    for size in SIZES:
        content = os.urandom(size)
        ends.write(content)
        ends.asking.post(ends.asking.e.IBV_WR_RDMA_WRITE, 0, size, remote=(key, address + LARGEST - size))
        ends.asking.done()
        assert ends.asked.memory.read(size, LARGEST - size) == content


def test_writes_with_immediate_data(ends: Ends) -> None:
    for size in (6, 5000):
        content = os.urandom(size)
        ends.write(content)
        ends.asked.receive(0, LARGEST)
        ends.asking.post(ends.asking.e.IBV_WR_RDMA_WRITE_WITH_IMM, 0, size, immediate=7, remote=ends.remote)
        ends.asking.done()
        (received,) = ends.asked.done()
        assert (received.byte_len, received.imm_data) == (size, 7)
        assert ends.asked.memory.read(size, 0) == content


def test_reads(ends: Ends) -> None:
    key, address = ends.remote
    for size in SIZES:
        content = os.urandom(size)
        ends.asked.memory.write(content, size, LARGEST - size)
        ends.asking.post(ends.asking.e.IBV_WR_RDMA_READ, 0, size, remote=(key, address + LARGEST - size))
        ends.asking.done()
        assert ends.asking.memory.read(size, 0) == content


def test_many_at_once(ends: Ends) -> None:
    """Writes, reads and sends in a row, with no wait between them."""
    key, address = ends.remote
    half, piece = LARGEST // 2, 20_000
    theirs, mine = os.urandom(half), os.urandom(half)
    ends.asked.memory.write(theirs, half)
    ends.write(mine)
    e = ends.asking.e
    for number in range(5):
        at = number * piece
        ends.asked.receive(half + 5 * piece + at, piece)
        ends.asking.post(e.IBV_WR_RDMA_WRITE, at, piece, remote=(key, address + half + at))
        ends.asking.post(e.IBV_WR_RDMA_READ, half + at, piece, remote=(key, address + at))
        ends.asking.post(e.IBV_WR_SEND, at, piece)
    ends.asking.done(15)
    ends.asked.done(5)
    assert ends.asking.memory.read(5 * piece, half) == theirs[: 5 * piece]
    assert ends.asked.memory.read(10 * piece, half) == 2 * mine[: 5 * piece]


def test_atomics(ends: Ends) -> None:
    e = ends.asking.e
    ends.asked.memory.write((41).to_bytes(8, "little"), 8)
    ends.asking.post(e.IBV_WR_ATOMIC_FETCH_AND_ADD, 64, 8, remote=ends.remote, atomic=(2, 0))
    ends.asking.done()
    assert ends.asking.memory.read(8, 64) == (41).to_bytes(8, "little")
    ends.asking.post(e.IBV_WR_ATOMIC_CMP_AND_SWP, 64, 8, remote=ends.remote, atomic=(43, 1 << 40))
    ends.asking.done()
    assert ends.asking.memory.read(8, 64) == (43).to_bytes(8, "little")
    ends.asking.post(e.IBV_WR_ATOMIC_CMP_AND_SWP, 64, 8, remote=ends.remote, atomic=(43, 5))
    ends.asking.done()
    assert ends.asking.memory.read(8, 64) == (1 << 40).to_bytes(8, "little")
    assert ends.asked.memory.read(8, 0) == (1 << 40).to_bytes(8, "little")


def test_a_receive_that_comes_late(ends: Ends) -> None:
    """Without a receive the asked one says so (RNR), and is asked again."""
    content = os.urandom(3000)
    ends.write(content)
    ends.asking.post(ends.asking.e.IBV_WR_SEND, 0, len(content))
    assert ends.asking.poll() is None
    ends.asked.receive(0, LARGEST)
    ends.asking.done()
    ends.asked.done()
    assert ends.asked.memory.read(len(content), 0) == content


@pytest.mark.parametrize("what", ["write", "read", "atomic", "send"])
def test_what_is_not_allowed_is_refused(
    ends: Ends, both: tuple[VerbsEnd, VerbsEnd], what: str, request: pytest.FixtureRequest
) -> None:
    """A wrong key ends both queue pairs with the same words on either side; so does a SEND too long."""
    key, address = ends.remote
    e = ends.asking.e
    wrong = (key ^ 0x5500, address)
    before = ends.asked.memory.read(64, 0)
    ends.write(b"no" * 2048)
    if what == "write":
        ends.asking.post(e.IBV_WR_RDMA_WRITE, 0, 4096, remote=wrong)
    elif what == "read":
        ends.asking.post(e.IBV_WR_RDMA_READ, 0, 4096, remote=wrong)
    elif what == "atomic":
        ends.asking.post(e.IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 8, remote=wrong, atomic=(1, 0))
    else:
        ends.asked.receive(64, 8)
        ends.asking.post(e.IBV_WR_SEND, 0, 4096)
    refused = ends.asking.completion().status
    if what == "send":
        # IBTA 9.7.4.1.4 has the receiver call it an invalid request; rxe calls it an operational error.
        ours_asked = ends.asked is both[1]
        assert refused == (e.IBV_WC_REM_INV_REQ_ERR if ours_asked else e.IBV_WC_REM_OP_ERR)
        assert ends.asked.completion().status == (
            e.IBV_WC_LOC_LEN_ERR if ours_asked else e.IBV_WC_LOC_QP_OP_ERR
        )
    else:
        assert refused == e.IBV_WC_REM_ACCESS_ERR
    assert ends.asked.memory.read(64, 0) == before
    ends.asking.post(e.IBV_WR_RDMA_WRITE, 0, 8, remote=ends.remote)
    assert ends.asking.completion().status == e.IBV_WC_WR_FLUSH_ERR
    for end in both:
        end.renew()
    mtu = 1024 if "1024" in request.node.name else 4096
    connect(*both, mtu)
