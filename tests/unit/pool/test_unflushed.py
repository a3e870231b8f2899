"""Which namespaces are flushed, and what a flush makes clean."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agent.pool.mover import WALK_AGAIN_SECONDS
from agent.pool.unflushed import Unflushed, flush_written
from tests.support.memory_lanes import MemoryLanes, MemoryNamespace
from tests.unit.pool.test_joining import Joined

HERE, THERE = bytes(range(1, 17)), bytes(range(2, 18))


@dataclass
class Sent:
    """A write under way."""

    done: bool = False
    received: int = 0
    fault: str | None = None
    unreachable: bool = False


def test_a_namespace_is_clean_after_a_flush_until_somebody_writes() -> None:
    unflushed = Unflushed()
    before = unflushed.mark(HERE)
    assert before is not None, "an agent before this one may have written there"
    unflushed.flushed(HERE, before)
    assert unflushed.mark(HERE) is None
    assert unflushed.mark(THERE) is not None
    unflushed.wrote(HERE, Sent(done=True))
    after = unflushed.mark(HERE)
    assert after is not None
    unflushed.flushed(HERE, before)
    assert unflushed.mark(HERE) is not None, "that flush was sent before the write"
    unflushed.flushed(HERE, after)
    assert unflushed.mark(HERE) is None


def test_a_flush_does_not_count_for_what_was_on_its_way() -> None:
    unflushed, first, second = Unflushed(), Sent(), Sent()
    unflushed.wrote(HERE, first)
    unflushed.wrote(HERE, second)
    mark = unflushed.mark(HERE)
    assert mark is not None
    first.done = second.done = True
    unflushed.flushed(HERE, mark)
    again = unflushed.mark(HERE)
    assert again is not None, "they were answered after the flush began"
    unflushed.flushed(HERE, again)
    assert unflushed.mark(HERE) is None


def test_answered_writes_are_not_kept() -> None:
    unflushed = Unflushed()
    for _ in range(1000):
        unflushed.wrote(HERE, Sent(done=True))
    assert len(unflushed._states[HERE].open) == 1


def test_only_what_was_written_is_flushed_and_a_failure_leaves_it_as_it_was() -> None:
    namespaces = [MemoryNamespace(1 << 30) for _ in range(3)]
    lanes = MemoryLanes(namespaces)
    assert lanes.run(flush_written(lanes, range(3))) == {}
    assert [each.flushes for each in namespaces] == [1, 1, 1]
    for namespace in (0, 1):
        lanes.write(namespace, 0, [bytes(4096)])
    namespaces[1].down = True
    assert set(lanes.run(flush_written(lanes, range(3)))) == {1}
    assert set(lanes.run(flush_written(lanes, range(3)))) == {1}
    namespaces[1].down, namespaces[1].hung = False, True
    assert lanes.run(flush_written(lanes, range(3))) == {1: "abandoned"}
    namespaces[1].hung = False
    assert lanes.run(flush_written(lanes, range(3))) == {}
    assert [each.flushes for each in namespaces] == [2, 5, 1]


def test_a_block_of_a_file_is_cleared_only_when_its_copy_is_flushed() -> None:
    joined = Joined()
    joined.fill(60)
    agent = joined.agent
    agent.volume.follow(replace(joined.after, kind="files"))
    wrong = joined.misplaced(agent)
    pseudonyms = {agent.volume.placement.pseudonym(key) for key in wrong}
    newcomer = joined.pool.namespaces[-1]

    def old_places() -> int:
        found = {entry.pseudonym for _, _, directory in joined.pool.directories() for _, entry in directory}
        return len(pseudonyms & found)

    assert old_places() == len(wrong) > 10
    newcomer.unflushable = True
    joined.move_all(agent)
    assert newcomer.writes, "they were copied"
    assert old_places() == len(wrong)
    newcomer.unflushable = False
    agent.lanes.clock += WALK_AGAIN_SECONDS
    joined.move_all(agent)
    assert old_places() < len(wrong) / 2
    joined.check(joined.other())
