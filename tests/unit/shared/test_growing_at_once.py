"""Chunks that grow on flash while several threads write, read, cut and close their file, step by step."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from agent.fs.close_cause import Closing
from agent.fs.interface import SetAttributes
from agent.fs.shared import file_content
from agent.fs.shared.discards import Discards
from agent.fs.shared.face import SharedFace
from agent.fs.shared.volume import SharedVolume
from agent.pool.access import serve
from agent.pool.format.sealed_slot import SlotSealer
from agent.pool.steps import Steps, is_steps
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.sim.faulty_flash import SimChannel, SimNamespace
from agent.sim.seeded_scheduler import Sleep, StepScheduler
from tests.support.fs.memory_shared import CALLER, CHUNK, MAKER, settings_of
from tests.support.pool.memory_pool import fixed_secret

UNIT = CHUNK
DATA = random.Random(7).randbytes(26 * UNIT)
QUICK = (0.001, 0.02)
"""Seconds of a command, drawn anew for each."""


@pytest.fixture(autouse=True)
def _headers_are_sealed_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The header of a slot has one nonce."""
    sealed: list[SlotSealer] = []
    twice: list[SlotSealer] = []
    real = SlotSealer.header_into

    def header_into(self: SlotSealer, *arguments: Any) -> Any:
        (twice if any(each is self for each in sealed) else sealed).append(self)
        return real(self, *arguments)

    monkeypatch.setattr(SlotSealer, "header_into", header_into)
    yield
    assert not twice


class OneFile:
    """A file that is open for writing, and threads with a channel each."""

    def __init__(self, seed: object, units: int, latency: tuple[float, float] = QUICK) -> None:
        self.scheduler = StepScheduler(str(seed))
        namespaces = [SimNamespace(1 << 40, latency=latency) for _ in range(4)]
        self.channels = [SimChannel(self.scheduler, namespaces) for _ in range(8)]
        self._now = self.channels[0]
        self.cache, timing = DirectoryCache(64 << 20), Timing(directory_fresh=1.0)
        chunks = Volume(
            settings_of("v", "shared", units * UNIT, 0, (4, 4)), fixed_secret(1), self.cache, timing
        )
        names = settings_of("v.names", "shared-names", 16_384, 2, (4, 4))
        volume = SharedVolume(
            "v", serve(chunks), serve(Volume(names, fixed_secret(2), self.cache, timing)), chunks.usage
        )
        self.face = SharedFace([volume], lambda: self._now, Discards(), judge=lambda *_: Closing.MEANT)
        self.root = self.face._volume_inodes[b"v"]
        entry, opened = self.finish(
            self.face.create(CALLER, self.root, b"f", 0o644, os.O_RDWR | os.O_CREAT), 0
        )
        self.file = entry.attributes.ino, opened.handle

    def finish(self, outcome: Any, thread: int = 7) -> Any:
        self._now = self.channels[thread]
        return self.scheduler.finish(outcome) if is_steps(outcome) else outcome

    def call(self, thread: int, verb: str, *arguments: Any) -> Steps[Any]:
        self._now = self.channels[thread]
        outcome = getattr(self.face, verb)(*arguments)
        return (yield from outcome) if is_steps(outcome) else outcome

    def write(self, thread: int, offset: int, data: bytes) -> Steps[Any]:
        return self.call(thread, "write", *self.file, offset, memoryview(data), MAKER)

    def name(self, thread: int) -> Steps[None]:
        yield from self.face._unnamed.name(self.channels[thread])

    def content(self, length: int) -> bytes:
        ino = self.finish(self.face.lookup(CALLER, self.root, b"f")).attributes.ino
        handle = self.finish(self.face.open(CALLER, ino, os.O_RDONLY)).handle
        into = memoryview(bytearray(length + 1))
        return bytes(into[: self.finish(self.face.read(ino, handle, 0, into))])


@pytest.mark.parametrize("small", [0.0, 0.2, 0.6])
@pytest.mark.parametrize("staged_most", [1, 2, 16])
@pytest.mark.parametrize("number", range(5))
def test_threads_that_fill_read_and_flush_one_file(
    number: int, staged_most: int, small: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`small`: the part of all units that come by small writes."""
    monkeypatch.setattr(file_content, "STAGED_CHUNKS_MAX", staged_most)
    dice = random.Random(f"{seed} {number} {staged_most} {small}")
    one = OneFile(f"{seed} {number}", 4)
    count = 24 + dice.randrange(3)
    wanted = DATA[: count * UNIT]
    pieces = [(at, 7000 if dice.random() < small else UNIT) for at in range(0, len(wanted), UNIT)]
    dice.shuffle(pieces)
    begun, done = set[int](), set[int]()

    def fill(thread: int) -> Steps[None]:
        for at, piece in pieces[thread::3]:
            begun.add(at // UNIT)
            for start in range(at, at + UNIT, piece):
                yield from one.write(thread, start, wanted[start : min(start + piece, at + UNIT)])
            done.add(at // UNIT)
            if dice.random() < 0.15:
                yield Sleep(one.scheduler.now + dice.random() * 0.6)

    def look(thread: int) -> Steps[None]:
        for _ in range(12):
            yield Sleep(one.scheduler.now + dice.random() * 0.05)
            first, sure = dice.randrange(count), frozenset(done)
            into = memoryview(bytearray(UNIT * dice.choice([1, 3, 6])))
            got = yield from one.call(thread, "read", *one.file, first * UNIT, into)
            for at in range(0, got, UNIT):
                unit = first + at // UNIT
                part = bytes(into[at : min(at + UNIT, got)])
                there = wanted[unit * UNIT :][: len(part)]
                if unit in sure:
                    assert part == there
                else:
                    written = there if unit in begun else bytes(len(part))
                    assert all(have in (0, want) for have, want in zip(part, written, strict=True))

    def flush() -> Steps[None]:
        for _ in range(4):
            yield Sleep(one.scheduler.now + dice.random() * 0.15)
            yield from one.call(5, "flush", *one.file, MAKER)

    def upkeep() -> Steps[None]:
        for _ in range(20):
            yield Sleep(one.scheduler.now + 0.1)
            yield from one.name(6)

    for thread in range(3):
        one.scheduler.spawn(f"fills {thread}", fill(thread))
    for thread in (3, 4):
        one.scheduler.spawn(f"looks {thread}", look(thread))
    one.scheduler.spawn("flushes", flush())
    one.scheduler.spawn("upkeep", upkeep())
    one.scheduler.run()
    one.finish(one.face.flush(*one.file, MAKER))
    one.finish(one.face.release(*one.file))
    assert not any(each.reserved for each in one.cache.snapshot())
    assert one.face._staged.held == 0
    assert one.content(len(wanted)) == wanted


def test_a_read_beside_a_close_ends_no_chunk_a_second_time() -> None:
    for number in range(60):
        one = OneFile(number, 4)

        def program(one: OneFile = one) -> Steps[None]:
            for chunk in range(4):
                yield from one.write(0, 4 * chunk * UNIT, DATA[:UNIT])
            one.scheduler.spawn("writes on", one.write(1, 9 * UNIT, DATA[:UNIT]))
            for thread in (3, 4):
                into = memoryview(bytearray(2 * UNIT))
                one.scheduler.spawn("reads", one.call(thread, "read", *one.file, 8 * UNIT, into))
            yield Sleep(one.scheduler.now + 0.001)
            yield from one.call(0, "flush", *one.file, MAKER)

        one.scheduler.spawn("program", program())
        one.scheduler.run()


def test_what_is_written_beside_a_cut_lies_behind_it_or_is_gone() -> None:
    for number in range(40):
        one = OneFile(number, 4)

        def beside(one: OneFile = one) -> Steps[None]:
            yield from one.write(1, 9 * UNIT, DATA[9 * UNIT : 10 * UNIT])

        def program(one: OneFile = one, beside: Any = beside) -> Steps[None]:
            yield from one.write(0, 0, DATA[: 2 * UNIT])
            one.scheduler.spawn("writes", beside())
            yield from one.call(0, "setattr", CALLER, one.file[0], SetAttributes(size=UNIT + 5), one.file[1])

        one.scheduler.spawn("program", program())
        one.scheduler.run()
        length = one.finish(one.face.getattr(CALLER, *one.file)).size
        one.finish(one.face.setattr(CALLER, one.file[0], SetAttributes(size=12 * UNIT), one.file[1]))
        into = memoryview(bytearray(12 * UNIT))
        assert one.finish(one.face.read(*one.file, 0, into)) == 12 * UNIT
        came = bytes(into[9 * UNIT : 10 * UNIT])
        assert came == (DATA[9 * UNIT : 10 * UNIT] if length > 9 * UNIT else bytes(UNIT))


def test_upkeep_has_the_time_of_a_write_for_a_chunk_that_lacks_much() -> None:
    one = OneFile(1, 16, (0.08, 0.12))

    def program() -> Steps[None]:
        yield from one.write(0, 15 * UNIT, DATA[:UNIT])
        for _ in range(14):
            yield Sleep(one.scheduler.now + 1)
            yield from one.name(1)
        yield from one.write(0, 0, DATA[UNIT : 2 * UNIT])
        yield from one.call(0, "flush", *one.file, MAKER)

    one.scheduler.spawn("program", program())
    one.scheduler.run()
    assert one.content(16 * UNIT) == DATA[UNIT : 2 * UNIT] + bytes(14 * UNIT) + DATA[:UNIT]
