"""The whole path over NVMe/RDMA, on emulated devices: tests of the other files here, with that transport."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from emulator.roce.wire.opcodes import Opcode
from tests.support.pool_up import PoolUp
from tests.support.roce.captures import read_packets
from tests.support.roce.packets import decode_packet_untrusted
from tests.system.path.test_path_faults import (
    test_a_hung_enclosure_costs_a_bounded_wait,
    test_an_enclosure_killed_and_brought_back_under_load,
)
from tests.system.path.test_whole_path import (
    test_a_get_by_path_costs_one_command_on_the_fabric,
    test_batches_holes_prestage_pin_and_delete,
    test_what_was_put_is_got_by_shim_and_by_path,
)

__all__ = [
    "test_a_get_by_path_costs_one_command_on_the_fabric",
    "test_a_hung_enclosure_costs_a_bounded_wait",
    "test_an_enclosure_killed_and_brought_back_under_load",
    "test_batches_holes_prestage_pin_and_delete",
    "test_what_was_put_is_got_by_shim_and_by_path",
]


@pytest.fixture(scope="module")
def options() -> tuple[str, ...]:
    return ("--transport", "rdma")


@pytest.fixture
def make_pool(make_pool: Callable[..., PoolUp]) -> Callable[..., PoolUp]:
    """Pools whose enclosures are reached by RDMA; what `pool_up` is made by, too."""
    return lambda *words: make_pool(*words, "--transport", "rdma")


def test_a_second_program_looks_at_the_pool(whole_pool: PoolUp) -> None:
    """Each process has a device of its own, at an address that is free."""
    import subprocess
    import sys

    shown = subprocess.run(
        [sys.executable, "-m", "agent.cli", "pool", "show", "--config", str(whole_pool.state / "agent.toml")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert 'transport = "rdma"' in (whole_pool.state / "agent.toml").read_text()


def test_a_capture_holds_the_packets_of_a_put_and_a_get(
    make_pool: Callable[..., PoolUp], tmp_path: Path
) -> None:
    """`--pcap`: a file for each NIC, and every packet in it is whole; the payload is ciphertext."""
    folder = tmp_path / "captures"
    pool_up = make_pool("--drives", "1", "--pcap", str(folder))
    secret = b"the plain text of a block. " * 200
    with pool_up.pool() as pool:
        kv = pool.volume("kv")
        assert kv.put(bytes(16), secret)
        assert kv.get(bytes(16)) == secret
    pool_up.down()
    opcodes = set()
    for file in folder.glob("*.pcap"):
        for captured in read_packets(file):
            packet = decode_packet_untrusted(captured.datagram, captured.flow, captured.ip_id)
            opcodes.add(packet.opcode)
            assert secret[:16] not in bytes(packet.payload)
    assert {Opcode.SEND_ONLY, Opcode.ACKNOWLEDGE, Opcode.UD_SEND_ONLY} <= opcodes
    assert opcodes & {Opcode.WRITE_ONLY, Opcode.WRITE_FIRST}
