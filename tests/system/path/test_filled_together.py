"""`/shared` through real mounts: files that several processes fill, each by its path, and by mappings."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest

from tests.support.fs.two_agents import TwoAgents, data_of
from tests.support.waiting import wait_until

MIB = 1 << 20
FILL = """
import os, sys
number, path, flags = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
file = os.open(path, flags)
print("opened", flush=True)
sys.stdin.readline()
os.pwrite(file, bytes([65 + number]) * 1_500_000, number * 1_500_000)
os.close(file)
"""


@pytest.mark.parametrize("is_made", [True, False])
def test_processes_each_fill_a_part_of_one_file(two: TwoAgents, folder: str, is_made: bool) -> None:
    path, flags = two.one / folder / "file", os.O_RDWR
    if is_made:
        with open(path, "wb") as file:
            file.truncate(4 * 1_500_000)
    else:
        flags |= os.O_CREAT
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", FILL, str(number), path, str(flags)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(4)
    ]  # fmt: skip
    try:
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "opened\n"
        for program in programs:
            program.communicate("go\n", timeout=60)
            assert program.returncode == 0
    finally:
        for program in programs:
            program.kill()
            program.wait()
    wanted = b"".join(bytes([65 + number]) * 1_500_000 for number in range(4))
    assert path.read_bytes() == wanted
    assert (two.two / folder / "file").read_bytes() == wanted


def test_of_two_hosts_that_each_fill_a_part_one_hears_that_it_has_not(two: TwoAgents, folder: str) -> None:
    with open(two.one / folder / "file", "wb") as file:
        file.truncate(2 * MIB)
    ours, theirs = (os.open(side / folder / "file", os.O_WRONLY) for side in (two.one, two.two))
    os.pwrite(ours, b"o" * MIB, 0)
    os.pwrite(theirs, b"t" * MIB, MIB)
    os.close(ours)
    with pytest.raises(OSError, match="Stale"):
        os.close(theirs)
    for side in (two.one, two.two):
        assert (side / folder / "file").read_bytes() == b"o" * MIB + bytes(MIB)


def test_what_a_program_writes_through_a_mapping_is_in_the_file(
    two: TwoAgents, folder: str, seed: int
) -> None:
    data = data_of(seed, 3 * MIB + 777)
    with open(two.one / folder / "file", "w+b") as file:
        file.truncate(len(data))
        with mmap.mmap(file.fileno(), len(data)) as mapped:
            mapped[:] = data
    assert (two.two / folder / "file").read_bytes() == data
    with open(two.one / folder / "file", "r+b") as file, mmap.mmap(file.fileno(), len(data)) as mapped:
        mapped[MIB + 5 : MIB + 9] = b"over"
    changed = data[: MIB + 5] + b"over" + data[MIB + 9 :]

    def is_there() -> bool:
        return (two.two / folder / "file").read_bytes() == changed

    wait_until(is_there, 30, "the end of the mapping")


FILL_AT_ONCE = """
import os, sys, threading
number, folder, flags = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def open_it(path):
    opened.append(os.open(path, flags))
for line in sys.stdin:
    opened = []
    try:
        thread = threading.Thread(target=open_it, args=[f"{folder}/{line.strip()}"])
        thread.start()
        thread.join()
        os.pwrite(opened[0], bytes([65 + number]) * 70_000, number * 70_000)
        os.close(opened[0])
        print("stored", flush=True)
    except OSError:
        print("refused", flush=True)
"""


def test_what_processes_fill_while_others_open_and_close_it_is_all_there(two: TwoAgents, folder: str) -> None:
    """None waits for another. A part may be refused, but what was stored is never lost."""
    command = [sys.executable, "-c", FILL_AT_ONCE]
    programs = [
        subprocess.Popen(
            [*command, str(number), two.one / folder, str(os.O_RDWR | os.O_CREAT)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(4)
    ]  # fmt: skip
    try:
        for turn in range(12):
            for program in programs:
                assert program.stdin is not None
                program.stdin.write(f"{turn}\n")
                program.stdin.flush()
            said = [program.stdout.readline().strip() for program in programs if program.stdout is not None]
            assert set(said) <= {"stored", "refused"}
            stored = [number for number, each in enumerate(said) if each == "stored"]
            content = (two.two / folder / str(turn)).read_bytes() if stored else b""
            for number in stored:
                part = content[number * 70_000 : (number + 1) * 70_000]
                assert part == bytes([65 + number]) * 70_000, (turn, said)
    finally:
        for program in programs:
            program.kill()
            program.communicate()
