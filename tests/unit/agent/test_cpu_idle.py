"""Processors are kept awake while there is work that it shortens."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from agent.host_os.cpu_idle import (
    LOOK_SECONDS,
    REQUESTS_PER_SECOND,
    SHORT_BYTES,
    Awake,
    AwakeWhileBusy,
    StayAwake,
    Work,
    cores_are_shared,
    wake_up_microseconds,
)


def test_it_asks_for_no_wake_up_time_at_all(tmp_path: Path) -> None:
    device = tmp_path / "cpu_dma_latency"
    device.touch()
    awake = Awake(device)
    assert awake.hold()
    assert awake.hold(), "asked again, it stands"
    assert struct.unpack("=i", device.read_bytes()) == (0,)
    awake.release()
    assert not awake.held
    awake.release()


def test_where_it_is_not_to_be_had_it_is_said_once(
    tmp_path: Path, expects_log: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    expects_log("processors sleep between requests")
    awake = Awake(tmp_path / "none", complain=logging.WARNING)
    assert not awake.hold()
    assert not awake.hold()
    assert ["No such file" in record.message for record in caplog.records] == [True]


class _Played:
    """An agent that has done so much so far, looked at once a LOOK_SECONDS."""

    def __init__(self, device: Path, when: StayAwake, *, shared: bool = True) -> None:
        device.touch()
        self.awake = Awake(device)
        self._busy = AwakeWhileBusy(self.awake, when, lambda: shared)
        self._work, self._now = Work(0, 0, 0), 100.0
        self._busy.look(self._work, self._now)

    def after(self, requests: int, transfers: int = 0, moved: int = 0) -> bool:
        """Whether they are kept awake, once so much more was done within one look."""
        before = self._work
        self._work = Work(before.requests + requests, before.transfers + transfers, before.bytes + moved)
        self._now += LOOK_SECONDS
        self._busy.look(self._work, self._now)
        return self.awake.held


@pytest.fixture
def short(tmp_path: Path) -> Iterator[_Played]:
    played = _Played(tmp_path / "cpu_dma_latency", "short")
    yield played
    played.awake.release()


def test_they_stay_awake_while_short_values_come(short: _Played) -> None:
    assert not short.awake.held, "nothing was asked for yet"
    assert short.after(30, 30, 30 * (64 << 10))
    assert short.after(30, 30, 30 * SHORT_BYTES)
    assert not short.after(0)
    assert short.after(30, 0, 0), "nothing but misses and lookups"
    assert not short.after(0)


def test_they_sleep_where_values_are_long(short: _Played) -> None:
    assert not short.after(30, 30, 30 * (SHORT_BYTES + 1))
    assert not short.after(900, 30, 30 << 20), "lookups do not make the values shorter"


def test_they_sleep_where_few_ask(short: _Played) -> None:
    few = int(REQUESTS_PER_SECOND * LOOK_SECONDS) - 1
    assert not short.after(few, few, few << 10)
    assert short.after(few + 2, few, few << 10)


def test_where_cores_are_shared_auto_is_short(tmp_path: Path) -> None:
    auto = _Played(tmp_path / "cpu_dma_latency", "auto", shared=True)
    assert auto.after(30, 30, 30 * SHORT_BYTES)
    assert not auto.after(30, 30, 30 * (SHORT_BYTES + 1))


def test_where_none_is_shared_auto_is_while_long_values_come_too(tmp_path: Path) -> None:
    auto = _Played(tmp_path / "cpu_dma_latency", "auto", shared=False)
    assert auto.after(30, 30, 30 << 20)
    few = int(REQUESTS_PER_SECOND * LOOK_SECONDS) - 1
    assert not auto.after(few, few, few << 20)
    assert not _Played(tmp_path / "another", "short", shared=False).after(30, 30, 30 << 20)


@pytest.mark.parametrize(
    ("siblings", "shared"),
    [(["0", "1"], False), (["0-1", "0-1"], True), (["0,2", "1", "0,2"], True), (["0", ""], True), ([], True)],
)
def test_whether_processors_share_a_core(tmp_path: Path, siblings: list[str], shared: bool) -> None:
    for number, siblings_of in enumerate(siblings):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings_of + "\n")
    other = tmp_path / "cpufreq" / "topology"
    other.mkdir(parents=True)
    (other / "thread_siblings_list").write_text("0-7\n" if siblings else "0\n")
    assert cores_are_shared(tmp_path) is shared


def test_a_list_that_cannot_be_read_is_taken_for_sharing(tmp_path: Path) -> None:
    (tmp_path / "cpu0" / "topology" / "thread_siblings_list").mkdir(parents=True)
    assert cores_are_shared(tmp_path)
    (tmp_path / "cpu0" / "topology" / "thread_siblings_list").rmdir()
    (tmp_path / "cpu0" / "topology" / "thread_siblings_list").write_bytes(b"\xff\n")
    assert cores_are_shared(tmp_path)


def test_always_is_while_any_come(tmp_path: Path) -> None:
    always = _Played(tmp_path / "cpu_dma_latency", "always")
    assert not always.after(0)
    assert always.after(1, 1, 4 << 20)
    assert not always.after(0)


def test_never_is_never(tmp_path: Path) -> None:
    assert not _Played(tmp_path / "cpu_dma_latency", "never").after(1000, 1000, 1000)


def test_they_may_sleep_again_once_the_agent_ends(tmp_path: Path) -> None:
    """Whatever ends it: a cancelled task gives back what it holds."""
    device = tmp_path / "cpu_dma_latency"
    device.touch()
    awake = Awake(device)
    held: list[bool] = []

    async def play() -> None:
        with trio.CancelScope() as scope:

            def work_done() -> Work:
                held.append(awake.held)
                if len(held) == 3:
                    scope.cancel()
                return Work(1000 * len(held), 0, 0)

            await AwakeWhileBusy(awake).keep(work_done)

    trio.run(play, clock=trio.testing.MockClock(autojump_threshold=0.0))
    assert held == [False, False, True], "the first look has nothing to compare with"
    assert not awake.held


def test_what_is_told_of_a_wake_up(tmp_path: Path) -> None:
    device = tmp_path / "cpu_dma_latency"
    assert wake_up_microseconds(device) is None
    device.write_bytes(b"\x01")
    assert wake_up_microseconds(device) is None
    device.write_bytes(struct.pack("=i", 2_000_000_000))
    assert wake_up_microseconds(device) == 2_000_000_000
