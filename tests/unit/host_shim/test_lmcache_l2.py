"""LMCache's L2 adapter against modules of LMCache's shape: tasks, events, results, and no exception."""

from __future__ import annotations

import errno
import functools
import os
import select
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from host_shim import named_values
from host_shim.pool import Pool
from tests.support.engines.fake_engines import Memory, ObjectKey, connector_with_fake_engine
from tests.support.engines.scripted_agent import ScriptedAgent
from tests.support.waiting import wait_until

KEYS = [ObjectKey(bytes([at]) * 32) for at in range(4)]


class HeldAgent(ScriptedAgent):
    """An agent that hangs in reads of values while `go` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        assert self.go.wait(30)
        return super().preadv(descriptor, into, offset)


@pytest.fixture
def agent() -> HeldAgent:
    return HeldAgent()


@pytest.fixture
def module(agent: HeldAgent, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with connector_with_fake_engine("host_shim.lmcache_l2") as module:
        monkeypatch.setattr(named_values, "Pool", functools.partial(Pool, files=agent))
        yield module


@pytest.fixture
def adapter(module: ModuleType, agent: HeldAgent) -> Iterator[Any]:
    adapter = module.G35L2Adapter({"mount": "/nowhere"})
    yield adapter
    agent.go.set()
    adapter.close()
    assert agent.open_files == 0


def wait_event(event: int) -> None:
    waiting = select.poll()
    waiting.register(event, select.POLLIN)
    assert waiting.poll(10_000)
    os.eventfd_read(event)


def store(adapter: Any, keys: list[ObjectKey], values: list[bytes]) -> int:
    task = adapter.submit_store_task(keys, [Memory(bytearray(value)) for value in values])
    done: dict[int, int] = {}
    while task not in done:
        wait_event(adapter.get_store_event_fd())
        done |= adapter.pop_completed_store_tasks()
    return done[task]


def look_up(adapter: Any, keys: list[ObjectKey]) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, {})
    wait_event(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None
    adapter.submit_unlock(keys)
    return found.bits


def load(adapter: Any, keys: list[ObjectKey], sizes: list[int]) -> list[bytes | None]:
    rooms = [Memory(bytearray(size)) for size in sizes]
    task = adapter.submit_load_task(keys, rooms)
    wait_event(adapter.get_load_event_fd())
    bits = adapter.query_load_result(task).bits
    assert adapter.query_load_result(task) is None
    return [bytes(room.data) if bit else None for room, bit in zip(rooms, bits, strict=True)]


def test_store_look_up_load_and_delete(agent: HeldAgent, adapter: Any) -> None:
    events = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(events) == 3
    assert look_up(adapter, KEYS) == [False] * 4
    assert store(adapter, KEYS[:3], [b"one", b"two22", b"three"]) == 13
    assert look_up(adapter, KEYS) == [True] * 3 + [False]
    assert len(agent.prestaged) == 3
    assert load(adapter, KEYS, [3, 5, 5, 5]) == [b"one", b"two22", b"three", None]
    assert load(adapter, KEYS[:1], [4]) == [None]  # another layout than it was stored with
    assert look_up(adapter, KEYS[:1]) == [False]
    adapter.delete(KEYS)
    wait_until(lambda: adapter.notified[-1][0] == "deleted", 10)
    assert adapter.notified[-1][1] == [(KEYS[1], 5), (KEYS[2], 5)]
    assert [kind for kind, _ in adapter.notified] == ["stored", "accessed", "deleted"]
    status = adapter.report_status()
    assert status["is_healthy"]
    assert (status["stored"], status["loaded"], status["missed"]) == (3, 3, 2)


@pytest.mark.parametrize(
    "other",
    [
        ObjectKey(bytes(32), model_name="org/other"),
        ObjectKey(bytes(32), kv_rank=1),
        ObjectKey(bytes(32), object_group_id=1),
        ObjectKey(bytes(32), cache_salt="tenant"),
    ],
    ids=["model", "rank", "group", "salt"],
)
def test_every_field_of_a_key_counts(adapter: Any, other: ObjectKey) -> None:
    store(adapter, [ObjectKey(bytes(32))], [b"mine"])
    assert look_up(adapter, [other, ObjectKey(bytes(32))]) == [False, True]


def test_a_task_with_a_failed_block_failed_but_the_others_are_there(
    agent: HeldAgent, module: ModuleType, expects_log: Callable[..., None]
) -> None:
    expects_log("refuses blocks: a block is empty")
    adapter = module.G35L2Adapter({"mount": "/nowhere", "prestage": False})
    assert store(adapter, KEYS[:2], [b"one", b""]) == -1
    assert look_up(adapter, KEYS[:2]) == [True, False]
    assert agent.prestaged == []
    adapter.close()


def test_an_agent_that_dies_is_failed_tasks_and_misses_until_it_is_back(
    agent: HeldAgent, adapter: Any
) -> None:
    store(adapter, KEYS[:1], [b"one"])
    agent.kill()
    assert load(adapter, KEYS[:1], [3]) == [None]
    assert look_up(adapter, KEYS[:1]) == [False]
    assert store(adapter, KEYS[1:2], [b"two"]) == -1
    assert not adapter.report_status()["is_healthy"]
    agent.restart()
    wait_until(lambda: load(adapter, KEYS[:1], [3]) == [b"one"], 10)


def test_an_enclosure_that_dies_is_failed_tasks_and_misses(agent: HeldAgent, adapter: Any) -> None:
    store(adapter, KEYS[:1], [b"one"])
    agent.fail(errno.EIO)
    assert store(adapter, KEYS[1:2], [b"two"]) == -1
    assert load(adapter, KEYS[:2], [3, 3]) == [b"one", None]


def test_no_call_waits_for_an_agent_that_hangs(agent: HeldAgent, adapter: Any) -> None:
    store(adapter, KEYS[:1], [b"one"])
    agent.go.clear()
    room = Memory(bytearray(3))
    tasks = [adapter.submit_load_task(KEYS[:1], [room]) for _ in range(20)]
    looking = adapter.submit_lookup_and_lock_task(KEYS, {})
    adapter.delete(KEYS[1:])
    assert all(adapter.query_load_result(task) is None for task in tasks)
    assert adapter.query_lookup_and_lock_result(looking) is None
    assert adapter.report_status()["volume"] == "kv"
    agent.go.set()
    results: dict[int, list[bool]] = {}
    while len(results) < 20:
        wait_event(adapter.get_load_event_fd())
        for task in tasks:
            found = adapter.query_load_result(task)
            if found is not None:
                results[task] = found.bits
    assert all(bits == [True] for bits in results.values())


def test_more_tasks_than_may_wait_fail_at_once(agent: HeldAgent, module: ModuleType) -> None:
    adapter = module.G35L2Adapter({"mount": "/nowhere", "threads": 1})
    adapter._readers._waiting_max = 2
    agent.go.clear()
    tasks = [adapter.submit_load_task(KEYS[:1], [Memory(bytearray(3))]) for _ in range(8)]
    results = [adapter.query_load_result(task) for task in tasks]
    assert [found.bits for found in results if found is not None] == [[False]] * (8 - results.count(None))
    assert 2 <= results.count(None) <= 3
    agent.go.set()
    adapter.close()


def test_a_bug_in_a_task_is_a_failed_task(adapter: Any, expects_log: Callable[..., None]) -> None:
    expects_log("work of g35-lmcache-load failed")
    assert load(adapter, [object()], [3]) == [None]  # type: ignore[list-item]


def test_after_close_tasks_fail_and_the_events_are_closed(module: ModuleType, agent: HeldAgent) -> None:
    adapter = module.G35L2Adapter({"mount": "/nowhere"})
    event = adapter.get_load_event_fd()
    adapter.close()
    adapter.close()
    with pytest.raises(OSError):
        os.eventfd_write(event, 1)
    assert adapter.query_load_result(adapter.submit_load_task(KEYS[:1], [Memory(bytearray(1))])) is None
    assert not adapter.report_status()["is_healthy"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, '"mount" is missing'),
        ({"mount": ""}, "names the folder"),
        (
            {"mount": "/nowhere", "volum": "kv"},
            "unknown options volum; there are events, events_topic, mount, parallel",
        ),
        ({"mount": "/nowhere", "threads": 0}, "1 to 64"),
        ({"mount": "/nowhere", "ttl": 0}, "without it, the volume decides"),
        ({"mount": "/nowhere", "volume": "absent"}, "no volume 'absent'"),
    ],
)
def test_wrong_options_are_said_at_the_start(
    module: ModuleType, agent: HeldAgent, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        module.G35L2Adapter(options)
    assert agent.open_files == 0
