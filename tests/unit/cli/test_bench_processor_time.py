"""What the bench says of processor time: by a /proc of the test's own, and by work of its own."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from agent.bench.meter import CLIENT, ProcessMeter, ThreadMeter
from agent.bench.names_and_units import CATALOG, GOALS
from agent.bench.processor_time import ThreadTime, Usage, kind_of, process_seconds, thread_times, used
from agent.bench.rounds import Sample, details, metered, together
from agent.bench.work_floors import CipherPart, CopyPart


def test_the_clock_of_a_process_is_that_of_its_processor_time() -> None:
    before = time.process_time()
    seen = process_seconds(os.getpid())
    assert before <= seen <= time.process_time()


def test_no_process_has_no_clock() -> None:
    with pytest.raises(OSError, match="Invalid"):
        process_seconds(1 << 22)  # above every pid_max


def thread(folder: Path, number: int, name: str, *, ran: int, queued: int, user: int, kernel: int) -> None:
    task = folder / "7/task" / str(number)
    task.mkdir(parents=True, exist_ok=True)
    before = "S 1 7 7 0 -1 4194304 106 0 0 0"
    (task / "stat").write_text(f"{number} ({name}) {before} {user} {kernel} 0 0 20 0\n")
    (task / "schedstat").write_text(f"{ran} {queued} 12\n")


def test_threads_are_read_with_any_name(tmp_path: Path) -> None:
    thread(tmp_path, 7, "python", ran=1_500_000_000, queued=0, user=0, kernel=0)
    thread(tmp_path, 8, "a) b (c", ran=2_000_000_000, queued=500_000_000, user=150, kernel=50)
    assert thread_times(7, tmp_path) == {
        7: ThreadTime("main", 1.5, 0.0, 0, 0),
        8: ThreadTime("a) b (c", 2.0, 0.5, 150, 50),
    }


def test_a_thread_that_ends_while_it_is_read_is_left_out(tmp_path: Path) -> None:
    thread(tmp_path, 7, "python", ran=1, queued=0, user=0, kernel=0)
    (tmp_path / "7/task/9").mkdir()
    assert list(thread_times(7, tmp_path)) == [7]


def test_threads_of_a_kind_are_one_and_ticks_divide_their_time() -> None:
    before = {1: ThreadTime("fuse-0", 1.0, 0.1, 10, 10), 2: ThreadTime("fuse-1", 1.0, 0.0, 0, 0)}
    after = {
        1: ThreadTime("fuse-0", 2.0, 0.3, 20, 30),
        2: ThreadTime("fuse-1", 3.0, 0.1, 10, 0),
        3: ThreadTime("upkeep", 0.5, 0.0, 0, 0),
    }
    found = used(before, after)
    assert list(found) == ["fuse", "upkeep"]
    assert found["fuse"].threads == 2
    assert found["fuse"].processor == pytest.approx(3.0)
    assert found["fuse"].kernel == pytest.approx(1.5)  # 20 of 40 ticks
    assert found["fuse"].user == pytest.approx(1.5)
    assert found["fuse"].queued == pytest.approx(0.3)
    assert found["upkeep"] == Usage(1, 0.5, 0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fuse-12", "fuse"),
        ("bench 3", "bench"),
        ("host-127.0.0.1:", "host"),
        ("host-[::1]:44", "host"),
        ("main", "main"),
        ("42", "42"),
    ],
)
def test_a_kind_is_a_name_without_its_number(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_meter_hears_of_timed_parts_only_and_their_threads_are_still_there() -> None:
    names: list[set[str]] = []

    class Names:
        def begin(self) -> None:
            names.append(set())

        def end(self) -> None:
            names[-1] = {thread.name for thread in threading.enumerate() if thread.name.startswith("bench ")}

    with metered(Names()):
        together([lambda: 1, lambda: None], 0.01)
    together([lambda: 1], 0.01)
    assert names == [{"bench 0", "bench 1"}]


def test_a_turn_that_fails_ends_metered_threads_too() -> None:
    def fails() -> int:
        raise ValueError("no more")

    with metered(ProcessMeter({})), pytest.raises(ValueError, match="no more"):
        together([lambda: 1, fails], 600.0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bench ")]


def test_meters_count_what_the_client_worked() -> None:
    processes, threads = ProcessMeter({"agent": os.getpid()}), ThreadMeter({})
    with metered(processes), metered(threads):
        timed = together([lambda: sum(range(1000)) and 1], 0.1)
    assert timed.operations
    assert 0 < processes.spent[CLIENT] <= processes.spent["agent"] * 1.5
    assert threads.parts == 1
    assert sum(usage.processor for usage in threads.usage[CLIENT].values()) > 0


@pytest.mark.parametrize(
    "part", [CipherPart(4096, opens=True), CipherPart(4096, opens=False), CopyPart(4096)]
)
def test_a_part_of_a_floor_does_its_work(part: CipherPart | CopyPart) -> None:
    part.prepare()
    (taken,) = part.measure(0.01).values()
    assert taken > 0


def test_a_record_has_the_median_of_what_its_value_was_made_of() -> None:
    samples = [Sample(1.0, 1, 1, 1.0, parts={"agent_us": taken}) for taken in (3.0, 1.0, 2.0)]
    assert details(samples)["agent_us"] == 2.0


def test_goals_are_of_names_that_there_are() -> None:
    assert all(CATALOG[name].in_rounds for name in GOALS)
