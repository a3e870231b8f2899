"""Proof that two paths lead to one medium: a block is written by the one and read by the other.

The block is random and has a place of its own: the last block before the first set (`PROOF_OFFSET`), or a key
of its own. It is written by the path in use, and only where a superblock of g35 lies; by the path in question
one block is read, and nothing is written (verified_paths.py).

Other agents write to the same place. So a path that reads something else is another medium only where the
path in use still reads our block. Otherwise another agent wrote after us, and the proof is tried again after
a random pause that grows, TRIES times at the most.

At a start and in the verbs the look round does this (agent/attach/connect.py), in an agent that serves a
thread of its own: a path that answers slowly must hold nobody up.
"""

import logging
import os
import random
import time
from collections.abc import Callable

from agent.errors import G35Error
from agent.host_os.worker_thread import OwnThread
from agent.pool.kv.commands import PROOF_KEY, kv_channel
from agent.pool.late_answers import wait_for
from agent.pool.map.inspect import Content
from agent.pool.map.kv_superblock import inspect_kv
from agent.pool.map.superblock import BLOCK_BYTES, MAGIC, PROOF_OFFSET
from agent.pool.steps import IoChannel, Steps
from agent.remote.channel import WorkerChannel
from agent.remote.enclosure import Enclosure, Route
from agent.remote.fabric import Fabric
from agent.remote.verified_paths import Unproven

log = logging.getLogger(__name__)

IO_SECONDS = 1.0
"""For one read or write."""
TRIES = 14
PAUSE_SECONDS, PAUSE_MOST_SECONDS = 0.01, 0.64
"""Before the second try at the most, twice as long before each one after it; and the longest of them."""
AGAIN_SECONDS = 5.0
"""Until what could not be found out is tried again."""
TURN_SECONDS, START_SECONDS = 1.0, 30.0
"""When no other proof is begun in a turn: in an agent that serves; before it does, and in a verb."""
EVERY_SECONDS = 0.5
"""Between two turns of an agent that serves."""
STOP_SECONDS = 5.0
"""For the proof that is under way. A try is three reads and writes."""
PROOF_MAGIC = b"g35path1"


class PathProber:
    """Tries the unproven paths of a fabric. One thread."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._not_before: dict[tuple[Enclosure, bytes], float] = {}
        """By path and namespace; without a namespace for all of them."""

    def turn(
        self,
        channel: WorkerChannel,
        seconds: float = TURN_SECONDS,
        pause: Callable[[float], bool | None] = time.sleep,
    ) -> None:
        """Do what is due, on the channel of the thread, in which no steps are under way; the rest next time.

        `pause` waits for so many seconds, and says whether to leave off.
        """
        unproven = self._fabric.unproven()
        began = time.monotonic()
        end = began + seconds
        self._not_before = {which: until for which, until in self._not_before.items() if until > began}
        # In no order: a discovery controller that lists very many must not keep the others waiting for ever,
        # and agents that start together should not meet at each namespace.
        for each in random.sample(unproven, len(unproven)):
            path, now = each.path.enclosure, time.monotonic()
            if now >= end or pause(0):
                break
            if any(self._not_before.get((path, which), now) > now for which in (b"", each.nguid)):
                continue
            try:
                is_one = shows(channel, each, pause)
            except G35Error:
                self._not_before[path, b""] = time.monotonic() + AGAIN_SECONDS
                continue
            if is_one is None:
                self._not_before[path, each.nguid] = time.monotonic() + AGAIN_SECONDS
            else:
                self._fabric.found(each, is_one)


class PathProberThread(OwnThread):
    """Tries the unproven paths of an agent that serves, until it is stopped."""

    def __init__(self, fabric: Fabric, take_channel: Callable[[], WorkerChannel]) -> None:
        """`take_channel` gives the thread its channel, which nobody else uses."""
        super().__init__("prover", STOP_SECONDS, "the prover of paths, which still waits for an answer,")
        self._prover = PathProber(fabric)
        self._take_channel = take_channel

    def _work(self) -> None:
        channel, stopping = self._take_channel(), self.stopping
        while not stopping.wait(EVERY_SECONDS):
            try:
                self._prover.turn(channel, pause=stopping.wait)
            except Exception:
                log.exception("looking into the paths that discovery lists failed; it is tried again")
                stopping.wait(AGAIN_SECONDS)


def shows(
    channel: WorkerChannel, unproven: Unproven, pause: Callable[[float], bool | None] = time.sleep
) -> bool | None:
    """Whether the path reads the block that the other wrote. None: no superblock of g35 lies there, or other
    agents wrote there each time, or `pause` said to leave off.

    Raises G35Error where one of the two does not answer, or refuses.
    """
    is_kv = unproven.by.kv is not None
    if is_kv is not (unproven.path.kv is not None):
        return False
    by, path = _only(unproven.by, unproven.nguid), _only(unproven.path, unproven.nguid)
    before = channel.go_by(by)
    try:
        if not channel.run(_is_of_a_pool(channel, unproven.nguid, is_kv)):
            return None
        for attempt in range(TRIES):
            longest = min(PAUSE_MOST_SECONDS, PAUSE_SECONDS * 2 ** (attempt - 1))
            if attempt and pause(random.uniform(0, longest)):
                break
            block = (PROOF_MAGIC + os.urandom(32)).ljust(BLOCK_BYTES, b"\0")
            channel.go_by(by)
            channel.run(_write(channel, block, is_kv))
            channel.go_by(path)
            if channel.run(_read(channel, is_kv)) == block:
                return True
            channel.go_by(by)
            if channel.run(_read(channel, is_kv)) == block:
                return False
        return None
    finally:
        channel.go_by(before)


def _only(way: Route, nguid: bytes) -> Fabric:
    """A fabric of one path and one namespace, which has number 0."""
    fabric = Fabric([way.enclosure])
    fabric.adopt([nguid])
    return fabric


def _is_of_a_pool(channel: IoChannel, nguid: bytes, is_kv: bool) -> Steps[bool]:
    if is_kv:
        found = yield from inspect_kv(channel, 0, nguid, IO_SECONDS)
        return found.content is Content.POOL
    head = memoryview(bytearray(BLOCK_BYTES))
    cause = yield from wait_for(channel, channel.read(0, 0, head), channel.now() + IO_SECONDS)
    if cause is not None:
        raise G35Error("the path in use does not answer")
    return head[: len(MAGIC)] == MAGIC


def _write(channel: IoChannel, block: bytes, is_kv: bool) -> Steps[None]:
    until = channel.now() + IO_SECONDS
    if is_kv:
        cause = yield from wait_for(channel, kv_channel(channel).kv_store(0, PROOF_KEY, [block]), until)
    else:
        cause = yield from wait_for(channel, channel.write(0, PROOF_OFFSET, [block]), until)
    if cause is not None:
        raise G35Error("the path in use does not take the block")


def _read(channel: IoChannel, is_kv: bool) -> Steps[bytes]:
    block = memoryview(bytearray(BLOCK_BYTES))
    until = channel.now() + IO_SECONDS
    if is_kv:
        pending = kv_channel(channel).kv_retrieve(0, PROOF_KEY, block)
        cause = yield from wait_for(channel, pending, until)
        if pending.missing:
            return b""
    else:
        cause = yield from wait_for(channel, channel.read(0, PROOF_OFFSET, block), until)
    if cause is not None:
        raise G35Error("the path does not answer")
    return bytes(block)
