"""Registered memory on the whole path: an agent maps what its clients registered, and lets go of it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from host_shim.block_key import key_of
from host_shim.pool import Pool
from host_shim.session_files import Files
from host_shim.transfer_wire import Ioctl, encode_register, ioctl_command
from tests.support.halting import halt
from tests.support.needs import needs_admin
from tests.support.pool_up import PoolUp
from tests.support.waiting import wait_until

MIB = 1 << 20
KEYS = [key_of(f"registered {number}") for number in range(8)]


def value(number: int) -> bytes:
    return bytes((number * 37 + at) % 251 for at in range(256)) * (MIB // 256)


def mapped(agent: int) -> int:
    return Path(f"/proc/{agent}/maps").read_text().count("/memfd:g35 (")


def test_an_agent_maps_it_for_as_long_as_the_client_has_it(pool_up: PoolUp) -> None:
    agent = pool_up.pid("agent-process")
    with pool_up.pool() as pool:
        volume, source, target = pool.volume("kv"), pool.memory(MIB), pool.memory(2 * MIB)
        assert pool_up.status()["memory"]["registered_bytes"] == 0
        for number, key in enumerate(KEYS):
            source[:] = value(number)
            assert volume.put(key, source)
        for number, key in enumerate(KEYS):
            assert volume.get_into(key, target) == MIB
            assert target[:MIB] == value(number)
            assert volume.get(key) == value(number)
        assert pool_up.status()["memory"]["registered_bytes"] == 3 * MIB
        assert mapped(agent) == 2
        counters = next(each for each in pool_up.status()["volumes"] if each["name"] == "kv")
        assert (counters["hits"], counters["bytes_copied"]) == (2 * len(KEYS), 0)
    wait_until(lambda: not mapped(agent), what="the agent to let go")
    assert pool_up.status()["memory"]["registered_bytes"] == 0


CLIENT = """
import sys
from host_shim.block_key import key_of
from host_shim.pool import Pool
from host_shim.session_files import Files
from host_shim.transfer_wire import Ioctl, encode_register, ioctl_command
pool = Pool(sys.argv[1])
memory = pool.memory(1 << 20)
while True:
    pool.volume("kv").put(key_of("killed"), memory)
    pool.volume("kv").get_into(key_of("killed"), memory)
    print("moved", flush=True)
"""


def test_a_client_that_is_killed_leaves_nothing(whole_pool: PoolUp) -> None:
    agent = whole_pool.pid("agent-process")
    for _ in range(3):
        command = [sys.executable, "-P", "-c", CLIENT, str(whole_pool.mount)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "moved\n"
            assert mapped(agent)
            client.kill()
        wait_until(lambda: not mapped(agent), what="the agent to let go")


def test_an_agent_that_is_killed_is_misses_and_no_wrong_byte(pool_up: PoolUp) -> None:
    with Pool(pool_up.mount, sessions=5) as pool:
        volume = pool.volume("kv")
        assert volume.put_many(KEYS, [value(number) for number in range(len(KEYS))]) == [True] * len(KEYS)
        stop, hits, wrong = threading.Event(), [0] * 4, []

        def get(number: int) -> None:
            ours, at = pool.memory(MIB), number
            while not stop.is_set():
                at = (at + 1) % len(KEYS)
                if volume.get_into(KEYS[at], ours) is None:
                    continue
                if ours != value(at):
                    wrong.append(at)
                # Nobody writes into it after the call has returned.
                ours[:] = bytes(MIB)
                if any(ours):
                    wrong.append(at)
                hits[number] += 1

        threads = [threading.Thread(target=get, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                before = list(hits)
                wait_until(lambda: all(now > was for now, was in zip(hits, before, strict=True)), 30)  # noqa: B023
                old = pool_up.kill("agent-process")
                pool_up.wait_restarted("agent-process", old)
            before = list(hits)
            wait_until(lambda: all(now > was for now, was in zip(hits, before, strict=True)), 30)
            # A get that comes before its memory is registered anew is served without.
            wait_until(lambda: pool_up.status()["memory"]["registered_bytes"] == 4 * MIB, 30)
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert not wrong


@needs_admin
def test_a_mount_that_is_taken_away_is_waited_for(make_pool: Callable[..., PoolUp]) -> None:
    """The kernel ends the call at once, and the agent is still at it: it stopped in the middle."""
    pool_up = make_pool("--drives", "1", "--no-restart")
    agent = pool_up.pid("agent-process")
    pool = pool_up.pool()
    volume, ours = pool.volume("kv"), pool.memory(MIB)
    assert volume.put(KEYS[0], ours)
    halt(agent)
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(volume.get_into(KEYS[0], ours)))
    thread.start()
    try:
        wait_until(lambda: _waits_in(thread, "request_wait_answer"), what="the get to be under way")
        subprocess.run(["umount", "-f", "-l", str(pool_up.mount)], check=True)
        wait_until(lambda: _waits_in(thread, "setlk"), what="the get to wait for the agent")
        assert not found
    finally:
        os.kill(agent, signal.SIGCONT)
    thread.join(30)
    assert found == [None]
    pool.close()


def _waits_in(thread: threading.Thread, where: str) -> bool:
    """Where the kernel has it blocked; ESRCH while there is none."""
    return where in Path(f"/proc/self/task/{thread.native_id}/stack").read_text()


def test_a_file_of_the_mount_itself_is_no_memory(whole_pool: PoolUp) -> None:
    """To ask anything about it would be to ask ourselves, with the worker that ought to answer."""
    session = os.open(whole_pool.mount / ".g35/session", os.O_RDWR)
    files = [os.open(whole_pool.mount / name, os.O_RDONLY) for name in (".g35/status.json", ".", "fs")]
    refusals: list[int | None] = []

    def register(descriptor: int) -> None:
        data = encode_register(descriptor, 4096)
        try:
            Files().ioctl(session, ioctl_command(Ioctl.REGISTER, len(data)), data)
        except OSError as refused:
            refusals.append(refused.errno)

    threads = [threading.Thread(target=register, args=(each,)) for each in (*files, session) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for each in (*files, session):
        os.close(each)
    assert refusals == [errno.EINVAL] * len(threads)
    assert whole_pool.answers()


FORKED = """
import os, sys
from host_shim.block_key import key_of
from host_shim.pool import Pool
with Pool(sys.argv[1]) as pool:
    volume, memory = pool.volume("kv"), pool.memory(1 << 20)
    memory[:] = b"p" * len(memory)
    assert volume.put(key_of("of the parent"), memory)
    child = os.fork()
    if not child:
        memory[:] = b"c" * len(memory)
        assert volume.put(key_of("of the child"), memory)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert memory[:1] == b"c"
    for name, letter in (("of the parent", b"p"), ("of the child", b"c")):
        assert volume.get_into(key_of(name), memory) == len(memory)
        assert memory == letter * len(memory)
"""


def test_a_child_of_a_fork_registers_for_itself(whole_pool: PoolUp) -> None:
    subprocess.run([sys.executable, "-P", "-c", FORKED, str(whole_pool.mount)], check=True, timeout=60)
    wait_until(lambda: not mapped(whole_pool.pid("agent-process")), what="the agent to let go")


def test_an_agent_that_may_not(make_pool: Callable[..., PoolUp]) -> None:
    """An ordinary mount to such an agent, and all works."""
    pool_up = make_pool("--drives", "1", "--door", "pyfuse3")
    with pool_up.pool() as pool:
        volume, ours = pool.volume("kv"), pool.memory(MIB)
        ours[:] = value(3)
        assert volume.put(KEYS[3], ours)
        ours[:] = bytes(MIB)
        assert volume.get_into(KEYS[3], ours) == MIB
        assert ours == value(3)
        assert pool_up.status()["memory"]["registered_bytes"] == 0
