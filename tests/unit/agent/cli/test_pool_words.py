"""What `g35 pool` says of a namespace, once and in words."""

from __future__ import annotations

import uuid

import pytest

from agent.cli.pool_verb import carried
from agent.pool.opening import Content
from agent.serving_mark import serving_processes, set_mark


@pytest.mark.parametrize(
    ("content", "detail", "words"),
    [
        (Content.BLANK, "", "blank"),
        (Content.POOL, "ab12", "a pool (ab12)"),
        (Content.FOREIGN, "something that is not g35's", "something that is not g35's"),
        (Content.FOREIGN, "it is not blank", "something that is not g35's"),
        (Content.FOREIGN, "a damaged superblock", "a damaged superblock"),
        (Content.FOREIGN, "a superblock written for namespace 07", "a superblock written for namespace 07"),
        (Content.UNREADABLE, "late", "nothing that could be read (late)"),
    ],
)
def test_what_is_carried_is_said_once(content: Content, detail: str, words: str) -> None:
    assert carried(content, detail) == words


def test_a_mark_is_seen_for_as_long_as_it_is_set() -> None:
    import os

    pool, other = uuid.uuid4().hex, uuid.uuid4().hex
    assert serving_processes({pool}) == []
    with set_mark(pool), set_mark(other):
        assert serving_processes({pool}) == [os.getpid()]
        assert serving_processes({pool, other}) == [os.getpid()]
        assert serving_processes(set()) == []
    assert serving_processes({pool, other}) == []
