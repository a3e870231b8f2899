"""Two copies, scrub and quarantine with enclosures, an agent and the verbs, as an operator meets them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent.pool.format.directory import DIRECTORY_BYTES, Directory, quarantine_entry
from agent.pool.format.sealed_slot import HEADER_BYTES, MAGIC
from agent.pool.map.document import DATA_START
from host_shim.pool import Pool
from tests.support.nvme.enclosure_process import EnclosureProcess
from tests.support.processes import Processes, Started
from tests.support.waiting import wait_until

VALUE_BYTES = 65_536
KEYS = [random.Random(f"scrubbed key {number}").randbytes(16) for number in range(8)]


def value_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(VALUE_BYTES)


class TwoShelves:
    """Two enclosures with a drive in a file each, a volume of two copies, and an agent that scrubs."""

    def __init__(self, processes: Processes, folder: Path, stack: ExitStack) -> None:
        self.folder, self.mount, self.config = folder, folder / "mnt", folder / "agent.toml"
        self._processes = processes
        self.enclosures = []
        for number in range(2):
            words = [
                "--drives=1", "--drive-size=12M", f"--folder={folder / f'd{number}'}", "--address=127.0.0.1"
            ]  # fmt: skip
            self.enclosures.append(EnclosureProcess.start(words, folder, name=f"jbof-{number}"))
            stack.callback(self.enclosures[number].stop)
        lines = [
            "[agent]", f'mount = "{self.mount}"', f'state = "{folder / "state"}"',
            f'key_file = "{folder / "root.key"}"', "workers = 1",
            "read_deadline_ms = 5000", "write_deadline_ms = 2000",
            "[scrub]", 'bandwidth = "200M"', "every_hours = 0.00001",
            "[[volumes]]", 'name = "v"', 'value_size = "64K"', "share = 1.0", "copies = 2",
        ]  # fmt: skip
        for number, each in enumerate(self.enclosures):
            lines += [
                "[[enclosures]]", f'name = "shelf-{number}"', 'address = "127.0.0.1"',
                f"port = {each.ready['port']}", f'nqn = "{each.ready["nqn"]}"',
            ]  # fmt: skip
        self.config.write_text("\n".join(lines))
        self.g35("key", "new", str(folder / "root.key"))
        self.pool("format")

    def g35(self, *words: str) -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "agent.cli", *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def pool(self, *words: str) -> str:
        return self.g35("pool", words[0], "--config", str(self.config), *words[1:])

    def serve(self) -> Started:
        started = self._processes.g35("agent", "--config", self.config)
        started.wait_for_line("ready", 60)
        return started

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.mount / ".g35/status.json").read_text())
        return found

    def drive(self, number: int) -> Path:
        [file] = [each for each in (self.folder / f"d{number}").iterdir() if each.stat().st_size >= 12 << 20]
        return file

    def slots(self, number: int) -> list[int]:
        """Where slots with values lie on a drive."""
        data = self.drive(number).read_bytes()
        return [at for at in range(DATA_START, len(data), HEADER_BYTES) if data[at : at + 8] == MAGIC]


@pytest.fixture
def shelves(processes: Processes, tmp_path: Path) -> Iterator[TwoShelves]:
    with ExitStack() as stack:
        yield TwoShelves(processes, tmp_path, stack)


def write_at(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as drive:
        drive.seek(at)
        drive.write(data)


def test_what_rots_is_found_mended_and_served_all_the_while(shelves: TwoShelves) -> None:
    agent = shelves.serve()
    with Pool(shelves.mount) as pool:
        volume = pool.volume("v")
        for key in KEYS:
            assert volume.put(key, value_of(key))
        wait_until(lambda: shelves.status()["volumes"][0]["copies_made"] == len(KEYS), 60, "second copies")
        assert [len(shelves.slots(number)) for number in range(2)] == [len(KEYS)] * 2

        for at in shelves.slots(0)[:3]:
            write_at(shelves.drive(0), at + HEADER_BYTES + 1000, b"rot")
        assert [volume.get(key) for key in KEYS] == [value_of(key) for key in KEYS]
        wait_until(lambda: shelves.status()["scrub"]["slots_bad"] == 3, 60, "the scrub to find them")
        mended = len(KEYS) + 3
        wait_until(lambda: shelves.status()["volumes"][0]["copies_made"] == mended, 60, "them to be mended")
        found = shelves.status()
        assert found["volumes"][0]["misses"] == 0
        assert found["scrub"]["slots_quarantined"] == 0
    assert agent.stop(30) == 0

    # The verbs, with one slot that somebody has set aside, and one that rots while no agent is there.
    drive = shelves.drive(1)
    directory = Directory(drive.read_bytes()[DATA_START : DATA_START + DIRECTORY_BYTES])
    free = min(directory.free_slots())
    directory.install(free, quarantine_entry(1_800_000_000.0))
    write_at(drive, DATA_START, directory.image())
    shown = json.loads(shelves.pool("show", "--quarantined", "--json"))["quarantined"]
    assert [(each["offset"], each["slot"]) for each in shown["slots"]] == [(DATA_START, free)]
    assert "given back: 1 slot" in shelves.pool("quarantine", "--release")
    write_at(drive, shelves.slots(1)[0] + HEADER_BYTES + 1000, b"rot")

    def scrub() -> dict[str, Any] | None:
        """None where nothing is bad but values are left alone, because their last get was seconds ago."""
        found: dict[str, Any] = json.loads(shelves.pool("scrub", "--bandwidth", "500M", "--json"))
        return found if found["slots_bad"] or not found["slots_young"] else None

    scrubbed = wait_until(scrub, 60, "the value not to be young")
    assert scrubbed is not None
    assert (scrubbed["passes"], scrubbed["slots_bad"], scrubbed["slots_quarantined"]) == (1, 1, 0)
    assert len(shelves.slots(1)) == len(KEYS), "copied once more, into the slot that was free again"
