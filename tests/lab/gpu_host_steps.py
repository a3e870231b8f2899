"""What the tests of the GPU host do inside of it; `tests/support/lab/guest_calls.py` calls these functions.

Everything goes through the guest's kernel to the device at `MOUNT`. Contents follow from a name and a seed,
so that whoever reads knows what has been written.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import signal
import subprocess
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from host_shim.pool import Pool
from tests.support.waiting import wait_until

MOUNT = Path("/mnt/g35")
FILES = MOUNT / "fs"
SHARED = MOUNT / "shared/shared"
MIB = 1 << 20
STOP = Path("/run/g35/stop")
TOLD_S = 900.0
"""Longer than the test outside waits, in all, before it says so."""


def content_of(name: str, size: int) -> bytes:
    """The bytes that belong to a name."""
    return random.Random(name).randbytes(size)


def key_of(name: str) -> bytes:
    """The key under which a value of this name is stored."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def mounted() -> dict[str, Any]:
    """The line of /proc/mounts, and what there is at the root."""
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    device, _place, kind = next(line[:3] for line in lines if line[1] == str(MOUNT))
    return {"device": device, "kind": kind, "names": sorted(os.listdir(MOUNT))}


def write_files(folder: str, count: int, size: int) -> None:
    """Files of `size` bytes each, flushed."""
    (FILES / folder).mkdir(exist_ok=True)
    for number in range(count):
        with (FILES / folder / str(number)).open("wb") as file:
            file.write(content_of(f"{folder}/{number}", size))
            file.flush()
            os.fsync(file.fileno())


def verify_files(folder: str, count: int, size: int, until_stopped: bool = False) -> dict[str, Any]:
    """Read every file past the guest's cache, again and again where `until_stopped`; what was wrong."""
    wrong: list[str] = []
    errors: list[str] = []
    passes = 0
    expected = [content_of(f"{folder}/{number}", size) for number in range(count)]
    while passes == 0 or (until_stopped and not STOP.exists()):
        drop_caches()
        for number in range(count):
            try:
                found = (FILES / folder / str(number)).read_bytes()
            except OSError as error:
                errors.append(f"{folder}/{number}: {error}")
                continue
            if found != expected[number]:
                wrong.append(f"{folder}/{number}: {len(found)} bytes")
        passes += 1
        Path("/run/g35/passes").write_text(str(passes))
    return {"passes": passes, "wrong": wrong, "errors": errors}


def hold_open(path: str, size: int) -> bool:
    """Read half of a file, wait until told to stop, read the rest by the same descriptor; whether all was
    right.
    """
    expected = content_of(path, size)
    with (FILES / path).open("rb", buffering=0) as file:
        first = file.read(size // 2)
        Path("/run/g35/holding").touch()
        wait_until(STOP.exists, TOLD_S, "the word to go on")
        drop_caches()
        return bytes(first or b"") + file.readall() == expected


def write_on(folder: str, names: int, size: int) -> dict[str, Any]:
    """Write the same files again and again until told to stop, each flushed before the next, then read them.

    A file whose bytes an agent took and did not flush before it was killed is refused with EIO, at the
    latest by fsync. After an fsync nothing may be refused or wrong.
    """
    (FILES / folder).mkdir()
    flushed: dict[int, str] = {}
    refused: list[str] = []
    count = 0
    while not STOP.exists() or count < names:
        number, text = count % names, f"{folder}/{count}"
        descriptor = os.open(FILES / folder / str(number), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        flushed.pop(number, None)
        try:
            assert os.write(descriptor, content_of(text, size)) == size
            os.fsync(descriptor)
            flushed[number] = text
        except OSError as error:
            refused.append(f"{text}: {error}")
        with suppress(OSError) if number not in flushed else nullcontext():
            os.close(descriptor)
        count += 1
    drop_caches()
    wrong = [
        text
        for number, text in flushed.items()
        if (FILES / folder / str(number)).read_bytes() != content_of(text, size)
    ]
    return {"count": count, "refused": refused, "wrong": wrong}


def listed(folder: str) -> list[str]:
    """The plain files of a folder, in order, by readdir and what it says of their kind."""
    return sorted(entry.name for entry in os.scandir(FILES / folder) if entry.is_file())


def file_calls() -> None:
    """What programs do with files beside reading and writing them from one end to the other."""
    place = FILES / "calls"
    place.mkdir()
    content = content_of("calls", 3 * MIB + 12345)
    (place / "a").write_bytes(content)
    (place / "folder").mkdir()
    (place / "a").rename(place / "folder" / "b")
    assert not (place / "a").exists()
    drop_caches()
    with (
        (place / "folder" / "b").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        assert mapped[MIB - 3 : MIB + 3] == content[MIB - 3 : MIB + 3]
        assert mapped[:] == content
    assert (place / "folder" / "b").stat().st_size == len(content)
    os.truncate(place / "folder" / "b", 5)
    assert (place / "folder" / "b").read_bytes() == content[:5]
    directly(place / "direct")


def directly(path: Path) -> None:
    """Write and read with O_DIRECT, in steps of 1 MiB and one of 4 KiB: no cache of the guest's between."""
    buffer = mmap.mmap(-1, 2 * MIB)
    buffer[:] = content_of("direct", 2 * MIB)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        with memoryview(buffer) as view:
            assert os.pwritev(descriptor, [view[:MIB]], 0) == MIB
            assert os.pwritev(descriptor, [view[MIB:]], MIB) == MIB
        read = mmap.mmap(-1, 2 * MIB)
        with memoryview(read) as view:
            assert os.preadv(descriptor, [view[:MIB]], 0) == MIB
            assert os.preadv(descriptor, [view[MIB : MIB + 4096]], MIB) == 4096
        assert read[: MIB + 4096] == buffer[: MIB + 4096]
    finally:
        os.close(descriptor)


def write_shared(folder: str, count: int, size: int) -> None:
    """Files of the shared volume as engines write them: folders, a name for the time being, the last name."""
    (SHARED / folder).mkdir(parents=True)
    for number in range(count):
        partial = SHARED / folder / f"{number}.tmp"
        partial.write_bytes(content_of(f"{folder}/{number}", size))
        partial.replace(SHARED / folder / str(number))
    directly(SHARED / folder / "direct")


def read_shared(folder: str, count: int, size: int) -> dict[str, Any]:
    """Read them past the guest's cache, whole and mapped: how many were right, and what was listed."""
    drop_caches()
    right = 0
    for number in range(count):
        expected = content_of(f"{folder}/{number}", size)
        with (
            (SHARED / folder / str(number)).open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        ):
            right += mapped[:] == expected == file.read()
    return {"right": right, "listed": sorted(os.listdir(SHARED / folder))}


def put_values(name: str, count: int, size: int) -> int:
    """How many values have been stored."""
    with Pool(MOUNT) as pool:
        volume = pool.volume("kv")
        return sum(
            volume.put(key_of(f"{name} {number}"), content_of(f"{name} {number}", size))
            for number in range(count)
        )


def get_values(name: str, count: int, size: int) -> dict[str, int]:
    """Hits, misses and wrong ones."""
    tally = {"hits": 0, "misses": 0, "wrong": 0}
    with Pool(MOUNT) as pool:
        volume = pool.volume("kv")
        for number in range(count):
            found = volume.get(key_of(f"{name} {number}"))
            right = found == content_of(f"{name} {number}", size)
            tally["misses" if found is None else "hits" if right else "wrong"] += 1
    return tally


def get_values_by(processor: int, name: str, count: int, size: int, turns: int = 3) -> dict[str, int]:
    """`get_values`, several times, by one processor: its requests come by one queue of the device."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {processor})
    try:
        tally = {"hits": 0, "misses": 0, "wrong": 0}
        with Pool(MOUNT) as pool:
            volume, into = pool.volume("kv"), memoryview(bytearray(size))
            for number in [*range(count)] * turns:
                length = volume.get_into(key_of(f"{name} {number}"), into)
                right = length == size and into == content_of(f"{name} {number}", size)
                tally["misses" if length is None else "hits" if right else "wrong"] += 1
        return tally
    finally:
        os.sched_setaffinity(0, before)


def replay(trace: str, requests: int) -> dict[str, Any]:
    """The first requests of a trace, as `g35 replay` plays them and `--json` says it."""
    from agent.replay.replay_options import ReplayOptions
    from agent.replay.run_replay import run_replay

    options = ReplayOptions(
        trace=Path(trace),
        mount=MOUNT,
        requests=requests,
        bytes_per_token=512,
        concurrency=2,
        agent_wait=60.0,
        json_output=True,
    )
    report = run_replay(options)
    return {"good": report.good, **report.record()}


def kill_a_reader(path: str, grace: float) -> bool:
    """Start to read a file, kill the reader while it waits, wait for it to go; whether that took `grace`."""
    drop_caches()
    reader = subprocess.Popen(["cat", str(FILES / path)], stdout=subprocess.DEVNULL)
    wait_until(lambda: waits_for_the_device(reader.pid), 240, "the reader to wait for the device")
    reader.send_signal(signal.SIGKILL)
    Path("/run/g35/killed").touch()
    started = time.monotonic()
    reader.wait(60)
    return time.monotonic() - started >= grace


def waits_for_the_device(pid: int) -> bool:
    """In the kernel, in a call of the fuse driver that has not come back."""
    try:
        return "fuse" in Path(f"/proc/{pid}/stack").read_text()
    except ProcessLookupError:
        return False


def drop_caches() -> None:
    """Give up clean pages, names and inodes: the device is asked again, and gets FORGETs."""
    Path("/proc/sys/vm/drop_caches").write_text("3")


def host_cpu(mebibytes: int, seconds: float) -> list[dict[str, Any]]:
    """The rows of `tests/lab/host_cpu.py`."""
    from tests.lab.host_cpu import all_costs, record

    return record(all_costs(MOUNT, mebibytes, seconds))
