"""When a connection's thread follows its host to another processor, and when it is let go."""

from __future__ import annotations

import os
import threading

from nvmeof.transport.near_host import APART, BOUND_FOR, LONG_BYTES, LOOK_EVERY, NearHost, Processors

ALL = frozenset({0, 1})
FOLLOWS = APART * LOOK_EVERY
"""Commands until it follows, all of which came in elsewhere."""


class Scripted(Processors):
    """Two processors; the packets come in at one, and the thread is at another."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.at = 0
        self.comes_in = 0
        self.refuses = refuses
        self.said: list[object] = []

    def here(self) -> int:  # type: ignore[override]
        return self.at

    def bind(self, processor: int) -> frozenset[int]:
        if self.refuses:
            raise OSError
        self.at = processor
        self.said.append(processor)
        return ALL

    def free(self, allowed: frozenset[int], bound_to: int) -> None:
        assert bound_to == self.at
        self.said.append(allowed)


def commands(near: NearHost, count: int, moved: int = LONG_BYTES) -> None:
    for _ in range(count):
        near.moved(moved)
        near.command()


def test_it_follows_after_so_many_and_is_free_again_later() -> None:
    processors = Scripted()
    near = NearHost(lambda: processors.comes_in, processors)
    processors.comes_in = 1
    commands(near, FOLLOWS - 1)
    assert processors.said == []
    commands(near, 1)
    assert processors.said == [1]
    commands(near, BOUND_FOR - 1)
    assert processors.said == [1]
    commands(near, 1)
    assert processors.said == [1, ALL]
    commands(near, 10 * FOLLOWS)
    assert processors.said == [1, ALL], "it is where they come in"


def test_short_payloads_are_no_reason() -> None:
    processors = Scripted()
    near = NearHost(lambda: processors.comes_in, processors)
    processors.comes_in = 1
    commands(near, 10 * FOLLOWS, LONG_BYTES - 1)
    assert processors.said == []
    near.moved(LONG_BYTES - 1)
    near.moved(1)  # of one command, by two calls
    near.command()
    commands(near, FOLLOWS - 1)
    assert processors.said == [1]


def test_it_is_let_go_as_well_where_payloads_get_short() -> None:
    processors = Scripted()
    near = NearHost(lambda: processors.comes_in, processors)
    processors.comes_in = 1
    commands(near, FOLLOWS)
    commands(near, BOUND_FOR, 4096)
    assert processors.said == [1, ALL]


def test_a_socket_that_does_not_say_where_its_packets_come_in() -> None:
    def unknown() -> int:
        raise OSError(92, "Protocol not available")

    processors = Scripted()
    commands(NearHost(unknown, processors), 10 * FOLLOWS)
    assert processors.said == []


def test_what_comes_in_here_as_often_as_there_is_no_reason() -> None:
    processors = Scripted()
    near = NearHost(lambda: processors.comes_in, processors)
    for number in range(10 * FOLLOWS):
        processors.comes_in = number % 2
        commands(near, 1)
    assert processors.said == []


def test_it_looks_at_each_fifth_long_command() -> None:
    looks: list[None] = []

    def incoming() -> int:
        looks.append(None)
        return 0

    commands(NearHost(incoming, Scripted()), 4 * LOOK_EVERY)
    assert len(looks) == 4


def test_a_look_that_finds_it_here_takes_one_back() -> None:
    processors = Scripted()
    near = NearHost(lambda: processors.comes_in, processors)
    for comes_in, looks in ((1, APART - 1), (0, 1), (1, 1)):
        processors.comes_in = comes_in
        commands(near, looks * LOOK_EVERY)
        assert processors.said == []
    commands(near, LOOK_EVERY)
    assert processors.said == [1]


def test_what_the_kernel_refuses_changes_nothing() -> None:
    processors = Scripted(refuses=True)
    near = NearHost(lambda: 1, processors)
    commands(near, 4 * FOLLOWS)
    assert processors.said == []


def test_the_calling_thread_and_no_other() -> None:
    """Of the real ones: bound to one of those it may use, freed to all of them, and never beyond."""
    before = os.sched_getaffinity(0)
    seen: list[object] = []

    def work() -> None:
        processors = Processors()
        somewhere = min(before)
        allowed = processors.bind(somewhere)
        seen.append(os.sched_getaffinity(0))
        if allowed:
            processors.free(allowed, somewhere + 1)
            seen.append(os.sched_getaffinity(0))
            processors.free(allowed, somewhere)
        else:
            seen.append(os.sched_getaffinity(0))
        seen.append(os.sched_getaffinity(0))
        seen.append(processors.bind(max(before) + 1))
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert seen == [{min(before)}, {min(before)}, before, frozenset(), before]
    assert os.sched_getaffinity(0) == before
    assert Processors.here() in range(os.cpu_count() or 1)
