"""Every part of the path broken in turn: a wrong byte is never served, and everything comes back."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.cli import doctor_verb
from agent.host_os.hung_agent import AgentHangs, answers, asked
from tests.support.halting import halted
from tests.support.pool_up import PoolUp, wait_each_served
from tests.support.processes import Processes
from tests.support.waiting import wait_until

VALUE = 200_000


def content(key: bytes) -> bytes:
    """What is stored under a key: derived from it, so that a reader can always tell."""
    return random.Random(key).randbytes(VALUE)


class Checker:
    """Puts and gets on a few threads until told to stop; counts wrong bytes and everything else."""

    def __init__(self, pool_up: PoolUp, seed: int, threads: int = 3) -> None:
        self._pool = pool_up.pool()
        self._stop = threading.Event()
        self.wrong = self.hits = self.misses = self.puts = 0
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, args=(random.Random(seed + number),))
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, dice: random.Random) -> None:
        kv = self._pool.volume("kv")
        while not self._stop.is_set():
            key = dice.randrange(60).to_bytes(16, "big")
            got = kv.get(key)
            stored = kv.put(key, content(key)) if got is None else False
            with self._lock:
                self.wrong += got is not None and got != content(key)
                self.hits += got is not None
                self.misses += got is None
                self.puts += stored

    def progressed(self, what: str) -> None:
        """Wait until more of `what` (hits, misses, puts) have happened."""
        before = getattr(self, what)
        wait_until(lambda: getattr(self, what) > before + 3, 30, f"more {what}")

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), "a call hangs"
        self._pool.close()
        assert self.wrong == 0
        assert self.hits
        assert self.puts


def test_an_enclosure_killed_and_brought_back_under_load(pool_up: PoolUp, seed: int) -> None:
    checker = Checker(pool_up, seed)
    try:
        checker.progressed("hits")
        for _ in range(3):
            old = pool_up.kill("jbof-1")
            pool_up.wait_restarted("jbof-1", old)
            pool_up.wait_connected(2)
            checker.progressed("hits")
    finally:
        checker.end()
    totals = pool_up.status()["totals"]
    assert sum(totals["miss_causes"].values()) == totals["misses"]
    assert totals["gets"] == totals["hits"] + totals["misses"]


def test_the_agent_killed_and_started_again_under_load(pool_up: PoolUp, seed: int) -> None:
    with pool_up.pool() as pool:
        acknowledged = [number.to_bytes(16, "little") for number in range(1000, 1020)]
        for key in acknowledged:
            assert pool.volume("kv").put(key, content(key))
    checker = Checker(pool_up, seed)
    try:
        checker.progressed("hits")
        old = pool_up.kill("agent-process")
        pool_up.wait_restarted("agent-process", old)
        checker.progressed("hits")
    finally:
        checker.end()
    with pool_up.pool() as pool:
        wait_each_served(pool.volume("kv"), {key: content(key) for key in acknowledged})


def test_a_hung_enclosure_costs_a_bounded_wait(make_pool: Callable[..., PoolUp], seed: int) -> None:
    pool_up = make_pool("--drives", "1", "--read-deadline-ms", "50", "--no-restart")
    # Short ones: what fifty milliseconds suffice for on a slow machine as well.
    stored = {key: content(key)[:20_000] for key in (number.to_bytes(16, "big") for number in range(40))}
    with pool_up.pool() as pool:
        kv = pool.volume("kv")
        for key, value in stored.items():
            assert kv.put(key, value)
        with halted(pool_up.pid("jbof-0")):
            waits, got = list[float](), set[bytes]()

            def ask_for_all() -> bool:
                for key, value in stored.items():
                    start = time.monotonic()
                    found = kv.get(key)
                    waits.append(time.monotonic() - start)
                    assert found in (None, value)
                    if found is not None:
                        got.add(key)
                return bool(got)

            ask_for_all()
            # Fifty milliseconds each at most, and nothing at all once its health is known; a queue is never
            # connected at a request's expense. The rest is for a busy machine.
            assert max(waits) < 3.0
            assert sum(waits) < 10.0
            wait_until(ask_for_all, 30, "the other enclosure to serve")
            assert len(got) < len(stored)
        wait_each_served(kv, stored)
    causes = pool_up.status()["totals"]["miss_causes"]
    assert causes["late"] + causes["enclosure_down"] > 0
    assert causes["late"] + causes["enclosure_down"] == sum(causes.values())


@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        ("flip", {"drive": 0, "bits": 4000}),
        ("flip", {"drive": 0, "on_read": True, "bits": 3}),
        ("error", {"drive": 0, "status": "unrecovered_read_error"}),
        ("zero", {"drive": 0, "offset": 0, "length": 256 << 20}),
    ],
)
def test_damage_is_a_miss_and_never_a_byte(
    make_pool: Callable[..., PoolUp], verb: str, fields: dict[str, object]
) -> None:
    pool_up = make_pool("--drives", "1", "--enclosures", "1")
    keys = [number.to_bytes(16, "big") for number in range(16)]
    with pool_up.pool() as pool:
        kv = pool.volume("kv")
        for key in keys:
            assert kv.put(key, content(key))
        pool_up.fault(0, verb, **fields)
        for key in keys:
            assert kv.get(key) in (None, content(key))
        totals = pool_up.status()["totals"]
        assert totals["misses"] == sum(totals["miss_causes"].values())
        assert totals["misses"] > 0, "the fault must have hit something"
        # A drive of zeros has forgotten even that it held anything; a bit that flips in the key of an entry,
        # while a directory is read, leaves an entry that is nobody's.
        forgotten = len(keys) if verb == "zero" else 2 * bool(fields.get("on_read"))
        assert totals["miss_causes"]["never_stored"] <= forgotten


def test_a_full_drive_refuses_puts_and_recovers(make_pool: Callable[..., PoolUp]) -> None:
    pool_up = make_pool("--drives", "1", "--enclosures", "1")
    with pool_up.pool() as pool:
        kv = pool.volume("kv")
        assert kv.put(bytes(16), content(bytes(16)))
        pool_up.fault(0, "full", drive=0)
        assert not kv.put(b"k" * 16, content(b"k" * 16))
        with pytest.raises(OSError) as refused:
            (pool_up.mount / "fs/file").write_bytes(bytes(2_000_000))
        assert refused.value.errno in (errno.EIO, errno.ENOSPC)
        assert kv.get(bytes(16)) == content(bytes(16))
        pool_up.fault(0, "heal", drive=0)
        assert kv.put(b"k" * 16, content(b"k" * 16))
        (pool_up.mount / "fs/file").write_bytes(bytes(2_000_000))
        assert (pool_up.mount / "fs/file").read_bytes() == bytes(2_000_000)


def test_a_drive_pulled_and_put_back(make_pool: Callable[..., PoolUp]) -> None:
    pool_up = make_pool("--drives", "2", "--enclosures", "1")
    keys = [number.to_bytes(16, "big") for number in range(20)]
    with pool_up.pool() as pool:
        kv = pool.volume("kv")
        for key in keys:
            assert kv.put(key, content(key))
        pool_up.fault(0, "remove", drive=1)
        wait_until(lambda: pool_up.status()["enclosures"][0]["namespaces"] == 1, 20, "the drive to be missed")
        got = [kv.get(key) for key in keys]
        assert all(value in (None, content(key)) for key, value in zip(keys, got, strict=True))
        assert None in got
        pool_up.fault(0, "add", drive=1)
        wait_until(lambda: pool_up.status()["enclosures"][0]["namespaces"] == 2, 20, "the drive to be back")
        wait_each_served(kv, {key: content(key) for key in keys})


def test_taking_it_down_while_it_is_busy(make_pool: Callable[..., PoolUp]) -> None:
    pool_up = make_pool("--drives", "1", "--enclosures", "1")
    (pool_up.mount / "fs/open").write_bytes(b"busy")
    descriptor = os.open(pool_up.mount / "fs/open", os.O_RDONLY)
    try:
        assert pool_up.down() == 0
        with pytest.raises(OSError):
            os.read(descriptor, 4)
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    assert not os.path.ismount(pool_up.mount)


def test_a_wrong_key_and_a_foreign_device_are_refused(
    pool_up: PoolUp, processes: Processes, tmp_path: Path
) -> None:
    config = tmp_path / "other.toml"
    key = tmp_path / "other.key"
    assert processes.g35("key", "new", key).process.wait(30) == 0
    text = (pool_up.state / "agent.toml").read_text().replace(str(pool_up.state / "root.key"), str(key))
    text = text.replace(f'mount = "{pool_up.mount}"', f'mount = "{tmp_path / "nowhere"}"')
    config.write_text(text)
    agent = processes.g35("agent", "--config", config)
    assert agent.process.wait(60) == 1
    assert f"process {pool_up.pid('agent-process')}, uses the state folder" in " ".join(agent.output.split())
    text = text.replace(f'state = "{pool_up.state / "agent"}"', f'state = "{tmp_path / "other"}"')
    config.write_text(text)
    agent = processes.g35("agent", "--config", config)
    assert agent.process.wait(60) == 1
    assert "was not made with the root key" in " ".join(agent.output.split())
    assert "Traceback" not in agent.output
    formatting = processes.g35("pool", "format", "--config", config)
    assert formatting.process.wait(60) == 1
    assert "it was not touched" in formatting.output
    assert pool_up.answers()


def test_a_pool_is_not_formatted_under_its_agent(
    make_pool: Callable[..., PoolUp], processes: Processes, tmp_path: Path
) -> None:
    pool_up = make_pool("--drives", "1", "--enclosures", "1", "--no-restart")
    # Another configuration, as of an operator who has forgotten that the agent runs.
    config = tmp_path / "other.toml"
    text = (pool_up.state / "agent.toml").read_text()
    text = text.replace(f'state = "{pool_up.state / "agent"}"', f'state = "{tmp_path / "other"}"')
    text = text.replace("share = 0.75", "share = 0.70")
    config.write_text(text + '[[volumes]]\nname = "one"\nshare = 0.01\nvalue_size = "64K"\n')
    with pool_up.pool() as pool:
        assert pool.volume("kv").put(bytes(16), content(bytes(16)))
        refused = processes.g35("pool", "format", "--force", "--config", config)
        assert refused.process.wait(60) == 1
        assert f"is being served, by process {pool_up.pid('agent-process')}" in refused.output
        assert pool.volume("kv").get(bytes(16)) == content(bytes(16))
    old = pool_up.kill("agent-process")
    wait_until(lambda: not os.path.exists(f"/proc/{old}") or not pool_up.answers(), 20, "its end")
    forced = processes.g35("pool", "format", "--force", "--config", config)
    assert forced.process.wait(60) == 0, forced.output


def test_an_agent_that_is_stopped_is_named_and_goes_on_when_it_is_let(
    pool_up: PoolUp, tmp_path: Path
) -> None:
    # Of the machine's mounts this one alone: those of others may come, go and hang meanwhile.
    table = tmp_path / "mountinfo"
    lines = Path("/proc/self/mountinfo").read_text().splitlines(keepends=True)
    table.write_text("".join(line for line in lines if f" {pool_up.mount} " in line))
    status = pool_up.mount / ".g35/status.json"
    with halted(pool_up.pid("agent-process")):
        with pytest.raises(AgentHangs, match="stopped or it hangs"):
            asked(pool_up.mount, status.read_text, 0.3)
        assert not answers(pool_up.mount, pool_up.answers, 0.3)
        (finding,) = doctor_verb._mounts_that_fail(table, seconds=0.3)
        assert f"{pool_up.mount} has not answered for 0.3 s" in finding.detail
    assert asked(pool_up.mount, status.read_text)
