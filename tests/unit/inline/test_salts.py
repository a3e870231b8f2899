"""A machine that is copied while it runs has its random bytes twice, and must not seal with them twice."""

from __future__ import annotations

import time

import pytest

from agent.inline import random_bytes as fetched_ahead
from agent.inline import salts
from agent.inline.cipher_suites import Place
from agent.inline.random_bytes import AHEAD_SECONDS, random_bytes
from agent.inline.salts import SALT_BYTES, new_salt
from agent.inline.secrets import SecretKey
from agent.pool.format.sealed_slot import SlotCodec

NGUID = bytes(range(16))
KEY = b"k" * 16


@pytest.mark.interpreted
def test_two_copies_of_a_machine_make_different_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a snapshot would have: the same bytes, fetched ahead, dealt out from the same place."""
    codec = SlotCodec(bytes(16), bytes(16), SecretKey(bytes(64)), "aes-256-gcm", 1 << 16, 4096)
    value = memoryview(bytes(1 << 16))
    random_bytes(1)
    memory = (fetched_ahead._bulk.bytes, fetched_ahead._bulk.taken, fetched_ahead._bulk.fetched_at)
    sealed = set()
    for _ in range(2):
        fetched_ahead._bulk.bytes, fetched_ahead._bulk.taken, fetched_ahead._bulk.fetched_at = memory
        monkeypatch.setattr(fetched_ahead.time, "monotonic", lambda: memory[2])
        sealer = codec.seal(KEY, 7, Place(NGUID, 3))
        into = bytearray(1 << 16)
        sealer.seal(0, value, memoryview(into))
        sealed.add(bytes(into))
    assert len(sealed) == 2, "the key stream of both is one"


@pytest.mark.interpreted
def test_each_part_of_a_write_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(salts, "random_bytes", lambda count: b"r" * count)
    clocks = {"time_ns": 5, "monotonic_ns": 6}
    for name in clocks:
        monkeypatch.setattr(salts.time, name, lambda name=name: clocks[name])
    made = {new_salt(KEY, 7, NGUID, 3)}
    assert made == {new_salt(KEY, 7, NGUID, 3)}
    made |= {
        new_salt(b"l" * 16, 7, NGUID, 3),
        new_salt(KEY, 8, NGUID, 3),
        new_salt(KEY, 7, b"n" * 16, 3),
        new_salt(KEY, 7, NGUID, 4),
    }
    for name in clocks:
        clocks[name] += 1
        made.add(new_salt(KEY, 7, NGUID, 3))
    assert len(made) == 7
    assert {len(each) for each in made} == {SALT_BYTES}


def test_salts_of_one_machine_differ() -> None:
    assert len({new_salt(KEY, 7, NGUID, 3) for _ in range(1000)}) == 1000


@pytest.mark.interpreted
def test_what_was_fetched_ahead_is_not_used_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a kernel that is told of its copying would have new bytes, and nobody would ask."""
    asked = []
    monkeypatch.setattr(fetched_ahead.os, "urandom", lambda count: asked.append(count) or bytes(count))
    began = time.monotonic() + 1000
    for after in (0.0, 0.5, AHEAD_SECONDS, AHEAD_SECONDS + 0.5, 2 * AHEAD_SECONDS + 1):
        monkeypatch.setattr(fetched_ahead.time, "monotonic", lambda after=after: began + after)
        random_bytes(8)
    assert len(asked) == 3
