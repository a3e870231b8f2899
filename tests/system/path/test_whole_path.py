"""From the GPU host's read to flash and back, through real processes, sockets and a real mount."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from host_shim.control_wire import AT_ONCE_BYTES, SESSION_PATH, value_xattr
from host_shim.pool import BufferTooSmall, UnknownVolume
from tests.support.pool_up import PoolUp

MIB = 1 << 20


def values(seed: int | str, count: int, most: int = MIB) -> dict[bytes, bytes]:
    """Keys and values of odd lengths."""
    dice = random.Random(seed)
    return {dice.randbytes(16): dice.randbytes(dice.randrange(1, most)) for _ in range(count)}


def test_what_was_put_is_got_by_shim_and_by_path(whole_pool: PoolUp, seed: int) -> None:
    before = whole_pool.status()["totals"]
    stored = values(f"put and got {seed}", 24)
    with whole_pool.pool() as pool:
        kv = pool.volume("kv")
        for key, value in stored.items():
            assert kv.put(key, value)
        for key, value in stored.items():
            assert kv.get(key) == value
            assert (whole_pool.mount / "kv/kv" / key.hex()).read_bytes() == value
        assert kv.exists([*stored, bytes(16)]) == [True] * len(stored) + [False]
        assert kv.get(bytes(16)) is None
    totals = whole_pool.status()["totals"]
    assert totals["hits"] - before["hits"] == 2 * len(stored)
    assert totals["misses"] - before["misses"] == 1
    assert totals["miss_causes"]["never_stored"] - before["miss_causes"]["never_stored"] == 1


def got_at_once(pool_up: PoolUp, stored: dict[bytes, bytes]) -> None:
    """Short values by one request: through the shim, and as any program may ask for them."""
    session = pool_up.mount / SESSION_PATH
    with pool_up.pool() as pool:
        kv, buffer = pool.volume("kv"), bytearray(AT_ONCE_BYTES)
        for key, value in stored.items():
            assert kv.put(key, value)
            assert kv.get_into(key, buffer) == len(value)
            assert buffer[: len(value)] == value
            assert os.getxattr(session, value_xattr("kv", key)) == value
        assert kv.get_into(bytes(16), buffer) is None
        with kv._pool._lender.lend() as lent:
            assert lent is not None
            assert lent.read_at_once("kv", bytes(16), memoryview(buffer)) == 0, "the mount gives it so"
        with pytest.raises(BufferTooSmall):
            kv.get_into(key, buffer[: len(value) - 1])
        with pytest.raises(UnknownVolume):
            pool.volume("no").get_into(key, buffer)


def test_short_values_by_one_request(whole_pool: PoolUp, seed: int) -> None:
    stored = values(f"at once {seed}", 20, AT_ONCE_BYTES)
    got_at_once(whole_pool, stored)
    session = whole_pool.mount / SESSION_PATH
    assert os.listxattr(session) == []
    for name in ("user.g35.other", "user.x", "security.capability"):
        with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
            os.getxattr(session, name)
    # Who may not read the session's file may not read by this way, not even through one that root opened.
    ask = f"import os; os.getxattr(0, {value_xattr('kv', next(iter(stored)))!r})"
    with session.open("rb") as opened:
        asked = subprocess.run(
            [sys.executable, "-I", "-c", ask], stdin=opened, user=65534, capture_output=True, check=False
        )
    assert b"PermissionError" in asked.stderr


def test_a_value_written_as_a_file_is_whole_at_its_first_close(whole_pool: PoolUp, seed: int) -> None:
    data = random.Random(seed).randbytes(700_001)
    name = whole_pool.mount / "kv/kv/some name that is hashed"
    with name.open("wb", buffering=0) as file:
        for at in range(0, len(data), 100_000):
            file.write(data[at : at + 100_000])
    assert name.read_bytes() == data
    assert name.stat().st_size == len(data)
    with pytest.raises(FileExistsError):
        name.open("wb")
    assert name.read_bytes() == data
    name.unlink()
    with pytest.raises(FileNotFoundError):
        name.read_bytes()
    with pytest.raises(FileNotFoundError):
        name.unlink()


def test_the_close_of_one_of_two_descriptors_completes_nothing(whole_pool: PoolUp) -> None:
    name = whole_pool.mount / "kv/kv/half"
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT)
    try:
        os.write(descriptor, b"first half, ")
        os.close(os.dup(descriptor))
        assert not name.exists()
        os.write(descriptor, b"second half")
    finally:
        os.close(descriptor)
    assert name.read_bytes() == b"first half, second half"
    name.unlink()


def test_a_get_by_path_costs_one_command_on_the_fabric(whole_pool: PoolUp) -> None:
    name = whole_pool.mount / "kv/kv/one round trip"
    name.write_bytes(bytes(MIB))
    name.read_bytes()
    began = time.monotonic()
    before = whole_pool.flash_commands()
    for _ in range(5):
        assert name.read_bytes() == bytes(MIB)
    after = whole_pool.flash_commands()
    # Python's buffer does not begin at a page, so the kernel asks twice; the fabric is asked once.
    # Once a second the agent reads a block of the pool map, a command of its own.
    looks = after["read_commands"] - before["read_commands"] - 5
    assert 0 <= looks <= 3 + time.monotonic() - began
    assert after["read_bytes"] - before["read_bytes"] == 5 * (MIB + 4096) + looks * 4096
    assert after["write_commands"] == before["write_commands"]


def test_write_amplification_stays_under_two_percent(whole_pool: PoolUp, seed: int) -> None:
    before = whole_pool.flash_commands()["write_bytes"]
    value = random.Random(seed).randbytes(MIB)
    with whole_pool.pool() as pool:
        kv = pool.volume("kv")
        for number in range(40):
            assert kv.put((number + 1).to_bytes(16, "big"), value)
    written = whole_pool.flash_commands()["write_bytes"] - before
    assert written / (40 * MIB) < 1.02


def test_many_threads_at_once_see_whole_values_only(whole_pool: PoolUp, seed: int) -> None:
    stored = values(f"many threads {seed}", 48, 200_000)
    with whole_pool.pool() as pool, ThreadPoolExecutor(8) as threads:
        kv = pool.volume("kv")
        assert all(threads.map(lambda item: kv.put(*item), stored.items()))
        for key, got in zip(stored, threads.map(kv.get, stored), strict=True):
            assert got == stored[key]


def test_batches_holes_prestage_pin_and_delete(whole_pool: PoolUp, seed: int) -> None:
    stored = values(f"batches {seed}", 6, 100_000)
    keys = [*stored, bytes(16)]
    buffers = [bytearray(100_000) for _ in keys]
    with whole_pool.pool() as pool:
        kv = pool.volume("kv")
        for key, value in stored.items():
            assert kv.put(key, value)
        assert all(kv.prestage(keys[:-1]))
        lengths = kv.get_many(keys, buffers)
        assert lengths == [*(len(value) for value in stored.values()), None]
        for buffer, value in zip(buffers, stored.values(), strict=False):
            assert buffer[: len(value)] == value
        assert kv.pin(keys, 60) == [*(True for _ in stored), False]
        assert kv.delete(keys) == [*(True for _ in stored), False]
        assert not any(kv.exists(keys))
        with pytest.raises(UnknownVolume):
            pool.volume("nowhere").get(bytes(16))


def test_two_agents_on_one_pool_both_serve_it(
    make_pool: Callable[..., PoolUp], seed: int, tmp_path: Path, processes: object
) -> None:
    pool_up = make_pool("--drives", "1", "--shared")
    other_mount = tmp_path / "other"
    text = (pool_up.state / "agent.toml").read_text()
    config = tmp_path / "second.toml"
    config.write_text(
        text.replace(str(pool_up.mount), str(other_mount)).replace(
            str(pool_up.state / "agent"), str(tmp_path / "second-agent")
        )
    )
    second = processes.g35("agent", "--config", config)  # type: ignore[attr-defined]
    second.wait_for_line("ready", 60)
    try:
        for at, (key, value) in enumerate(values(seed, 10).items()):
            one, two = pool_up.mount / "kv/kv", other_mount / "kv/kv"
            writer, reader = (one, two) if at % 2 else (two, one)
            (writer / key.hex()).write_bytes(value)
            assert (reader / key.hex()).read_bytes() == value
    finally:
        assert second.stop() == 0


def test_files_survive_a_restart_of_everything(make_pool: Callable[..., PoolUp], seed: int) -> None:
    pool_up = make_pool("--drives", "1")
    stored = values(seed, 8)
    with pool_up.pool() as pool:
        for key, value in stored.items():
            assert pool.volume("kv").put(key, value)
    (pool_up.mount / "fs/folder").mkdir()
    (pool_up.mount / "fs/folder/file").write_bytes(bytes(range(256)) * 10_000)
    assert pool_up.down() == 0
    pool_up.start_again()
    assert (pool_up.mount / "fs/folder/file").read_bytes() == bytes(range(256)) * 10_000
    with pool_up.pool() as pool:
        for key, value in stored.items():
            assert pool.volume("kv").get(key) == value


@pytest.mark.parametrize("suite", ["aes-256-xts+crc64", "plain+crc64"])
def test_the_other_suites(make_pool: Callable[..., PoolUp], suite: str, seed: int) -> None:
    pool_up = make_pool("--drives", "1", "--enclosures", "1", "--suite", suite)
    stored = values(seed, 6)
    with pool_up.pool() as pool:
        for key, value in stored.items():
            assert pool.volume("kv").put(key, value)
            assert pool.volume("kv").get(key) == value


def test_the_reference_door_serves_the_same(make_pool: Callable[..., PoolUp], seed: int) -> None:
    pool_up = make_pool("--drives", "1", "--enclosures", "1", "--door", "pyfuse3")
    stored = values(seed, 6)
    with pool_up.pool() as pool:
        for key, value in stored.items():
            assert pool.volume("kv").put(key, value)
            assert pool.volume("kv").get(key) == value
            assert (pool_up.mount / "kv/kv" / key.hex()).read_bytes() == value
    got_at_once(pool_up, values(seed + 1, 6, AT_ONCE_BYTES))


def test_nothing_stored_is_readable_on_the_drives(make_pool: Callable[..., PoolUp]) -> None:
    pool_up = make_pool("--drives", "1", "--enclosures", "1")
    marker = b"the plain text of a value that nobody may see on flash" * 20
    with pool_up.pool() as pool:
        assert pool.volume("kv").put(bytes(16), marker)
    (pool_up.mount / "fs/file").write_bytes(marker)
    assert pool_up.down() == 0
    stored = b"".join(file.read_bytes() for file in (pool_up.state / "drives-0").iterdir())
    assert b"g35slot1" in stored, "the detector must see slots at all"
    assert marker[:54] not in stored
