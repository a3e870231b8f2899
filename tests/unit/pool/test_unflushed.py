"""Which namespaces are flushed, and what a flush makes clean."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agent.pool.maintenance.rebalance import WALK_AGAIN_SECONDS, Rebalancer
from agent.pool.write.flush_tracking import OPEN_LOOK, RUNS_MAX, UnflushedWrites, flush_written
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
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
    unflushed = UnflushedWrites()
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
    unflushed, first, second = UnflushedWrites(), Sent(), Sent()
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


def test_a_few_answered_writes_are_kept_and_never_counted() -> None:
    """A look at all that are open with each write would cost more than to keep them."""
    unflushed = UnflushedWrites()
    for _ in range(1000):
        unflushed.wrote(HERE, Sent(done=True))
        assert len(unflushed._states[HERE].open) <= OPEN_LOOK
    mark = unflushed.mark(HERE)
    assert mark == unflushed.number
    assert not unflushed._states[HERE].open


def test_a_look_at_open_writes_is_paid_for_by_those_since_the_last() -> None:
    """Not by each of a batch, all of which are under way: 64 of them took some 2,000 questions."""
    asked = 0

    class Slow(Sent):
        @property
        def done(self) -> bool:
            nonlocal asked
            asked += 1
            return is_answered

        @done.setter
        def done(self, value: bool) -> None: ...

    unflushed, is_answered = UnflushedWrites(), False
    for _ in range(64):
        unflushed.wrote(HERE, Slow())
    assert asked <= 2 * 64
    assert len(unflushed._states[HERE].open) == 64
    is_answered = True
    for _ in range(64):
        unflushed.wrote(HERE, Slow())
    assert len(unflushed._states[HERE].open) < 64, "once answered they are forgotten"


def test_only_what_was_written_is_flushed_and_a_failure_leaves_it_as_it_was() -> None:
    namespaces = [MemoryNamespace(1 << 30) for _ in range(3)]
    channel = MemoryChannel(namespaces)
    assert channel.run(flush_written(channel, range(3))) == {}
    assert [each.flushes for each in namespaces] == [1, 1, 1]
    for namespace in (0, 1):
        channel.write(namespace, 0, [bytes(4096)])
    namespaces[1].down = True
    assert set(channel.run(flush_written(channel, range(3)))) == {1}
    assert set(channel.run(flush_written(channel, range(3)))) == {1}
    namespaces[1].down, namespaces[1].hung = False, True
    assert channel.run(flush_written(channel, range(3))) == {1: "abandoned"}
    namespaces[1].hung = False
    assert channel.run(flush_written(channel, range(3))) == {}
    assert [each.flushes for each in namespaces] == [2, 5, 1]


def test_a_block_of_a_file_is_cleared_only_when_its_copy_is_flushed() -> None:
    joined = Joined()
    joined.fill(60)
    agent = joined.agent
    agent.volume.change(layout=agent.volume.layout(replace(joined.after, kind="files")))
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
    agent.channel.clock += WALK_AGAIN_SECONDS
    joined.move_all(agent)
    assert old_places() < len(wrong) / 2
    joined.check(joined.other())


def test_a_flush_over_a_later_session_leaves_earlier_writes_in_doubt() -> None:
    unflushed = UnflushedWrites()
    first = unflushed.session_began()
    unflushed.wrote(HERE, Sent(done=True), unflushed.sessions)
    before = unflushed.number
    second = unflushed.session_began()
    unflushed.wrote(HERE, Sent(done=True), unflushed.sessions)
    after = unflushed.number
    assert unflushed.is_open(HERE, before, before)
    assert not unflushed.is_open(THERE, before, after)
    mark = unflushed.mark(HERE)
    assert mark is not None
    unflushed.flushed(HERE, mark, second)
    assert unflushed.mark(HERE) is None
    assert not unflushed.is_open(HERE, before, after)
    assert before <= unflushed.doubtful(HERE) < after
    assert unflushed.doubtful(THERE) == 0
    unflushed.wrote(HERE, Sent(done=True), unflushed.sessions)
    mark = unflushed.mark(HERE)
    assert mark is not None
    unflushed.flushed(HERE, mark, first)
    assert unflushed.doubtful(HERE) == before, "a path that stood all the time proves it"


def test_a_flush_proves_what_another_path_wrote_if_its_session_is_older() -> None:
    unflushed = UnflushedWrites()
    standing = unflushed.session_began()
    unflushed.session_began()
    unflushed.wrote(HERE, Sent(done=True), unflushed.sessions)
    unflushed.session_began()
    mark = unflushed.mark(HERE)
    assert mark is not None
    unflushed.flushed(HERE, mark, standing)
    assert unflushed.doubtful(HERE) == 0


def test_a_write_that_was_under_way_is_judged_by_the_flush_that_follows_it() -> None:
    unflushed, slow = UnflushedWrites(), Sent()
    unflushed.wrote(HERE, Sent(done=True), unflushed.sessions)
    done = unflushed.number
    unflushed.wrote(HERE, slow, unflushed.sessions)
    began = unflushed.session_began()
    mark = unflushed.mark(HERE)
    assert mark == done
    unflushed.flushed(HERE, mark, began)
    assert unflushed.doubtful(HERE) == done
    slow.done = True
    again = unflushed.mark(HERE)
    assert again == done + 1
    unflushed.flushed(HERE, again, began)
    assert unflushed.doubtful(HERE) == done + 1


def test_many_sessions_without_a_flush_are_not_all_kept() -> None:
    unflushed = UnflushedWrites()
    first = unflushed.number + 1
    for _ in range(10 * RUNS_MAX):
        began = unflushed.session_began()
        unflushed.wrote(HERE, Sent(done=True), unflushed.sessions)
    assert len(unflushed._states[HERE].runs) == RUNS_MAX
    assert unflushed.is_open(HERE, first, first)
    mark = unflushed.mark(HERE)
    assert mark is not None
    unflushed.flushed(HERE, mark, began)
    assert unflushed.doubtful(HERE) == mark - 1


def test_a_copy_that_is_in_doubt_is_made_again_before_the_old_one_is_cleared() -> None:
    """The drive of the newcomer had kept the directories and lost the slots."""
    joined = Joined()
    joined.fill(60)
    agent = joined.agent
    settings = replace(joined.after, kind="files")
    agent.volume.change(layout=agent.volume.layout(settings))
    newcomer, extent = joined.pool.namespaces[-1], settings.extents[-1]
    mover = Rebalancer([agent.volume], 1 << 30)
    while not mover.moves.values:
        agent.channel.run(mover.turn(agent.channel))
        agent.channel.clock += 0.5
    directories = {extent.offset + number * settings.set_bytes for number in range(extent.sets)}
    newcomer.new_session({at: block for at, block in newcomer.blocks.items() if at in directories})
    for _ in range(100):
        agent.channel.run(mover.turn(agent.channel))
        agent.channel.clock += 0.5
    joined.check(joined.other())
