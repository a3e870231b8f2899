"""The kernel's NVMe/TCP host as a client of our KV namespaces: nvme-cli on the generic character device.

The kernel offers no block device for a namespace of the KV command set, only /dev/ngXnY, and passes commands
through unseen. So nvme-cli is told opcode and dwords by hand, as the KV Command Set specification has them
and not as our own code does.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from emulator.jbof.control_client import ask
from tests.support.lab import kernel_host
from tests.support.lab.kernel_host import KernelController, run
from tests.support.lab.lab_enclosure import MEBIBYTE, RunningEnclosure, start_enclosure
from tests.support.processes import Processes
from tests.support.waiting import wait_until

KEY = b"a block's key 16"
STORE, RETRIEVE, LIST, DELETE, EXIST = 0x01, 0x02, 0x06, 0x10, 0x14
KEY_NOT_FOUND, KEY_EXISTS, VALUE_SIZE, KEY_SIZE = 0x87, 0x89, 0x85, 0x86
WAIT_S = 240


@dataclass(frozen=True, slots=True)
class Answer:
    """What nvme-cli printed of a completion."""

    status: int
    result: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Passthrough:
    """One generic device, and a folder for nvme-cli's files."""

    device: Path
    nsid: int
    folder: Path

    def __call__(
        self, opcode: int, key: bytes, size: int = 0, *, options: int = 0, value: bytes | None = None
    ) -> Answer:
        low, second, third, high = struct.unpack("<4I", key.ljust(16, b"\0"))
        words = [
            *(
                "nvme",
                "io-passthru",
                str(self.device),
                f"--opcode={opcode:#x}",
                f"--namespace-id={self.nsid}",
            ),
            *(f"--cdw2={low:#x}", f"--cdw3={second:#x}", f"--cdw10={size:#x}"),
            *(f"--cdw11={len(key) | options << 8:#x}", f"--cdw14={third:#x}", f"--cdw15={high:#x}"),
        ]
        out = self.folder / "out"
        out.write_bytes(b"")
        if value is not None:
            out.write_bytes(value)
            words += [f"--data-len={size}", f"--input-file={out}", "--write"]
        elif size:
            words += [f"--data-len={size}", "--read", "--raw-binary"]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=WAIT_S, check=False
        )
        said = done.stderr.decode(errors="replace")
        status = re.search(r"NVMe status: .*\((0x[0-9a-fA-F]+)\)", said)
        result = re.search(r"value: (0x[0-9a-fA-F]+|\d+)|result: ?(0x[0-9a-fA-F]+|[0-9a-fA-F]{8})", said)
        if done.returncode != 0:
            assert status is not None, f"{words}: {said}"
            return Answer(int(status[1], 16) & 0x7FF, 0, b"")
        number = (result[1] or result[2]) if result is not None else "0"
        return Answer(0, int(number, 16), done.stdout if size and value is None else b"")


@pytest.fixture(scope="module")
def enclosure(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> RunningEnclosure:
    """One drive of blocks and one of keys."""
    folder = tmp_path_factory.mktemp("enclosure")
    return start_enclosure(module_processes, folder, "--kv-drives", "1", "--name", "keys")


@pytest.fixture(scope="module")
def controller(enclosure: RunningEnclosure) -> Iterator[KernelController]:
    yield enclosure.connect()
    kernel_host.disconnect_all()


@pytest.fixture(scope="module")
def kv(controller: KernelController, tmp_path_factory: pytest.TempPathFactory) -> Passthrough:
    nqn = controller.attribute("subsysnqn")

    def generic() -> Path | None:
        # Below its subsystem with native multipathing, otherwise below its controller; both name the NQN. The
        # kernel looks at namespaces side by side, so the number in the name need not be the namespace id.
        for node in Path("/sys/class/nvme-generic").glob("ng*"):
            named = node / "device" / "subsysnqn"
            if not named.exists() or named.read_text().strip() != nqn:
                continue
            device = Path("/dev", node.name)
            # The kernel lists a device before it makes its node.
            if device.exists() and run("nvme", "get-ns-id", device).strip().endswith(":2"):
                return device
        return None

    device = wait_until(generic, WAIT_S, "the generic device of namespace 2")
    assert device is not None, kernel_host.kernel_log()
    return Passthrough(device, 2, tmp_path_factory.mktemp("passthru"))


def test_the_kernel_offers_a_block_device_for_blocks_alone(
    controller: KernelController, kv: Passthrough
) -> None:
    controller.wait_for_namespace(1)
    assert 2 not in controller.namespaces()
    assert not Path("/dev", kv.device.name.replace("ng", "nvme")).exists()


@pytest.mark.parametrize("size", [1, 4096, 70_001, MEBIBYTE], ids=str)
def test_a_value_is_stored_and_retrieved(kv: Passthrough, size: int) -> None:
    value = os.urandom(size)
    assert kv(STORE, KEY, size, value=value).status == 0
    answer = kv(RETRIEVE, KEY, size)
    assert answer.status == 0
    assert answer.result == size
    assert answer.data[:size] == value


def test_a_longer_buffer_and_a_shorter_one(kv: Passthrough) -> None:
    assert kv(STORE, b"short", 5000, value=b"v" * 5000).status == 0
    answer = kv(RETRIEVE, b"short", 8192)
    assert (answer.result, answer.data[:5000]) == (5000, b"v" * 5000)
    answer = kv(RETRIEVE, b"short", 1000)
    assert (answer.result, answer.data) == (5000, b"v" * 1000)


def test_statuses(kv: Passthrough) -> None:
    key = b"there and gone"
    assert kv(EXIST, key).status == KEY_NOT_FOUND
    assert kv(RETRIEVE, key, 4096).status == KEY_NOT_FOUND
    assert kv(DELETE, key).status == KEY_NOT_FOUND
    assert kv(STORE, key, 4, options=1, value=b"good").status == KEY_NOT_FOUND
    assert kv(STORE, key, 4, options=2, value=b"good").status == 0
    assert kv(STORE, key, 4, options=2, value=b"evil").status == KEY_EXISTS
    assert kv(EXIST, key).status == 0
    assert kv(RETRIEVE, key, 4).data == b"good"
    assert kv(DELETE, key).status == 0
    assert kv(EXIST, key).status == KEY_NOT_FOUND
    assert kv(EXIST, b"").status == KEY_SIZE


def test_keys_are_listed(kv: Passthrough) -> None:
    for number in range(3):
        assert kv(STORE, b"list-%d" % number, 1, value=b"x").status == 0
    data = kv(LIST, b"list-1", 64).data
    (count,) = struct.unpack_from("<I", data)
    assert count >= 2
    assert data[4:6] == b"\6\0"
    assert data[6:12] == b"list-1"
    assert data[12:14] == b"\6\0"
    assert data[14:20] == b"list-2"


def test_faults_reach_the_kernel_as_a_status(enclosure: RunningEnclosure, kv: Passthrough) -> None:
    assert kv(STORE, b"faulty", 4, value=b"good").status == 0
    ask(enclosure.control, "error", drive=1, status="unrecovered_error", do_not_retry=True)
    try:
        assert kv(RETRIEVE, b"faulty", 4).status == 0x88
    finally:
        ask(enclosure.control, "heal")
    assert kv(RETRIEVE, b"faulty", 4).data == b"good"
