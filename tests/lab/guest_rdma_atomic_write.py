"""Atomic writes of the kernel's rxe and of the emulator's, either one asking.

rxe has them since Linux 6.2, and libibverbs' provider of it by an extended queue pair alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from emulator.roce.pyverbs import enums as e
from tests.support.lab.rdma_cable import KERNEL, OURS, RXE, Cable, far_device
from tests.support.roce.verbs_end import VerbsEnd

SIZE = 4096
SEND_OPS = e.IBV_QP_EX_WITH_ATOMIC_WRITE | e.IBV_QP_EX_WITH_RDMA_READ

pytestmark = pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 2),
    reason=f"rxe of Linux {os.uname().release} has no atomic write: g35 lab boots 6.12",
)


@pytest.fixture(params=["kernel-asks", "we-ask"])
def ends(request: pytest.FixtureRequest, cable: Cable) -> Iterator[tuple[VerbsEnd, VerbsEnd]]:
    """Who asks and who is asked, connected."""
    cable.set_mtu(1500)
    with (
        far_device() as device,
        VerbsEnd("pyverbs", RXE, KERNEL, SIZE, send_ops=SEND_OPS) as kernel,
        VerbsEnd("emulator.roce.pyverbs", device.name, OURS, SIZE, send_ops=SEND_OPS) as ours,
    ):
        mtu = kernel.e.IBV_MTU_1024
        kernel.connect(ours, path_mtu=mtu, first_psn=0xFFFFF0, expected_psn=0xFFFFFA)
        ours.connect(kernel, path_mtu=mtu, first_psn=0xFFFFFA, expected_psn=0xFFFFF0)
        yield (kernel, ours) if request.param == "kernel-asks" else (ours, kernel)


def _ask(asking: VerbsEnd, key: int, address: int, content: bytes) -> int:
    """The status of an atomic write."""
    asking.pair.wr_flags = asking.e.IBV_SEND_SIGNALED
    asking.pair.wr_start()
    asking.pair.wr_atomic_write(key, address, content)
    asking.pair.wr_complete()
    done = asking.completion()
    return int(done.status)


def test_eight_bytes_at_a_time(ends: tuple[VerbsEnd, VerbsEnd]) -> None:
    asking, asked = ends
    for number in range(20):
        content = bytes([number + 1]) * 8
        at = 64 + 8 * number
        assert _ask(asking, asked.memory.rkey, asked.memory.buf + at, content) == asking.e.IBV_WC_SUCCESS
        assert asked.memory.read(8, at) == content
    assert asked.memory.read(8, 56) == asked.memory.read(8, 64 + 8 * 20) == bytes(8)


def test_a_wrong_key_is_refused(ends: tuple[VerbsEnd, VerbsEnd]) -> None:
    asking, asked = ends
    asked.memory.write(bytes(8), 8)
    refused = _ask(asking, asked.memory.rkey ^ 0x5500, asked.memory.buf, b"not here")
    assert refused == asking.e.IBV_WC_REM_ACCESS_ERR
    assert asked.memory.read(8, 0) == bytes(8)
