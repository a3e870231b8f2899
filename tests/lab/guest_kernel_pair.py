"""The lab's check of itself: the kernel's host against the kernel's target, with none of our code between.

When this fails, the lab is broken; when only the others fail, we are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lab import kernel_host
from tests.support.lab.kernel_target import KernelTarget
from tests.support.lab.packet_capture import Capture, read_connections

pytestmark = pytest.mark.usefixtures("disconnected")


@pytest.fixture
def target() -> Iterator[KernelTarget]:
    with KernelTarget() as running:
        yield running


@pytest.mark.parametrize("digests", [False, True], ids=["plain", "digests"])
def test_the_kernel_talks_to_itself(target: KernelTarget, digests: bool, tmp_path: Path) -> None:
    nguid = target.add_namespace(1)
    content = os.urandom(128 << 10)
    with Capture(tmp_path / "pcap", target.port):
        controller = kernel_host.connect(target.nqn, target.port, digests=digests)
        device = controller.wait_for_namespace(1)
        assert controller.identify_namespace(1)["nguid"] == nguid.hex
        device.write_bytes(content)
        kernel_host.drop_caches()
        with device.open("rb") as disk:
            assert disk.read(len(content)) == content
        controller.disconnect()
    admin, *io = read_connections(tmp_path / "pcap")
    assert len(io) == os.cpu_count(), "an I/O queue for each core"
    assert admin.from_client[0] == 0, "a connection starts with an ICReq"
    assert admin.from_client[11] == (3 if digests else 0), "bits of the digests it asks for"
    assert sum(len(queue.from_client) for queue in io) > len(content)


def test_discovery_lists_the_subsystem(target: KernelTarget) -> None:
    records = kernel_host.discover(target.port)
    assert target.nqn in [record["subnqn"] for record in records]


def test_namespaces_come_and_go(target: KernelTarget) -> None:
    target.add_namespace(1)
    controller = kernel_host.connect(target.nqn, target.port)
    controller.wait_for_namespace(1)
    target.add_namespace(2)
    controller.wait_for_namespace(2)
    target.remove_namespace(1)
    controller.wait_for_no_namespace(1)
