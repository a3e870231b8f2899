"""What processes of an agent share of a guest's sessions, seen by both ends of one memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from agent.fs import guest_sessions
from agent.fs.guest_sessions import OUTCOMES, GuestWords, shared_words
from agent.fs.virtiofs.guest_view import EPOCH_SHIFT


@pytest.fixture
def ends() -> Iterator[tuple[GuestWords, GuestWords]]:
    descriptor = shared_words()
    try:
        yield GuestWords(descriptor), GuestWords(descriptor)
    finally:
        os.close(descriptor)


def test_a_session_has_one_version_whatever_the_epoch(ends: tuple[GuestWords, GuestWords]) -> None:
    first, reader = ends
    for handle in (1, 7, 255, 256, 511, 512, 70_000):
        for epoch in (0, 1, 2, 9, 1000):
            seen = handle | epoch << EPOCH_SHIFT
            before = reader.version_of(seen)
            first.raise_version(handle)
            assert reader.version_of(seen) == before + 1


def test_what_became_of_a_get_is_told_by_its_serial(ends: tuple[GuestWords, GuestWords]) -> None:
    first, reader = ends
    assert first.outcome_of(5) == -1
    assert not first.ended_before(5, 1 << 20)
    reader.tell(5, 0, 77)
    assert [first.ended_before(5, within) for within in (1, 76, 77, 78)] == [False, False, True, True]
    reader.tell(6, 3)
    assert (first.outcome_of(5), first.outcome_of(6)) == (0, 3)
    reader.tell(5 + OUTCOMES, 1)
    assert first.outcome_of(5, 18) == 18, "another get has its place"
    assert first.outcome_of(5 + OUTCOMES) == 1
    assert not first.ended_before(5, 1 << 20)
    assert not first.ended_before(5 + OUTCOMES, 1 << 20), "a miss has no length"
    reader.tell((1 << 50) + 1, 18)
    assert first.outcome_of((1 << 50) + 1) == 18


def test_a_whole_value_has_ended(ends: tuple[GuestWords, GuestWords]) -> None:
    first, reader = ends
    assert not first.may_have_ended(5, 77), "none has served it"
    reader.tell(5, 0, 77)
    assert [first.may_have_ended(5, within) for within in (1, 76, 77, 78)] == [False, False, True, True]
    assert not first.may_have_ended(5 + OUTCOMES, 77), "its place has an earlier one"
    reader.tell(5 + OUTCOMES, 1)
    assert first.may_have_ended(5, 1), "a later get has its place, so nobody knows"
    assert not first.may_have_ended(5 + OUTCOMES, 77), "it was a miss"


@pytest.mark.interpreted
def test_an_outcome_is_never_seen_before_its_length(
    ends: tuple[GuestWords, GuestWords], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On x86 no fence is needed for that. So the test looks at the words where Arm has one."""
    first, reader = ends
    seen: list[tuple[int, int]] = []

    def look() -> None:
        seen.append((first.outcome_of(5), first._lengths[5]))

    monkeypatch.setattr(guest_sessions, "ordering_fence", look)
    reader.tell(5, 0, 77)
    assert seen == [(-1, 77)], "the length is written before the fence, the outcome behind it"
    # Of the same serial, for a get of which the outcome was read before the fence and the length behind it.
    monkeypatch.setattr(guest_sessions, "ordering_fence", lambda: reader._lengths.__setitem__(5, 99))
    assert not first.ended_before(5, 77)


def test_a_mark_is_taken_once(ends: tuple[GuestWords, GuestWords]) -> None:
    first, reader = ends
    assert not reader.take_mark(b"k" * 16)
    first.mark(b"k" * 16)
    assert reader.take_mark(b"k" * 16)
    assert not reader.take_mark(b"k" * 16)


def test_a_guest_is_live_once_it_is_said(ends: tuple[GuestWords, GuestWords]) -> None:
    first, reader = ends
    assert not reader.is_live
    first.say_live(True)
    assert reader.is_live
    first.raise_version(0)
    assert reader.is_live
    first.say_live(False)
    assert not reader.is_live
