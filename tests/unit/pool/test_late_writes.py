"""A write that nobody answered for lands late: a key that was deleted meanwhile must not come back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agent.inline.scatter import Buffer, Target
from agent.pool.access import serve
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.maintenance.replication import Kept, keep_two, work_off
from agent.pool.steps import Acquire, Wait
from agent.pool.volume.directory_cache import COOLDOWN_SECONDS
from agent.pool.volume.in_doubt_writes import KEYS_MAX, InDoubtWrites
from agent.pool.volume.replication_backlog import NamedCopy
from agent.pool.write.delete_and_pin import delete as delete_steps
from agent.pool.write.write_back import WriteBack
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace, MemoryPending, rest_of
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

VALUE = bytes(range(250)) * 30


class LateChannel(MemoryChannel):
    """Writes are not answered while `stuck`, and land with `thaw`."""

    def __init__(self, namespaces: Sequence[MemoryNamespace]) -> None:
        super().__init__(namespaces)
        self.stuck = False
        self.kept: list[tuple[int, int, bytes]] = []
        self._unanswered: list[MemoryPending] = []

    def write(
        self, namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False
    ) -> MemoryPending:
        if not self.stuck:
            return super().write(namespace, offset, parts, more=more)
        self.kept.append((namespace, offset, b"".join(bytes(part) for part in parts)))
        self._unanswered.append(MemoryPending())
        return self._unanswered[-1]

    def answer(self) -> None:
        """All that was kept lands, and is told to have landed."""
        self.thaw()
        for pending in self._unanswered:
            pending.done = True

    def thaw(self) -> None:
        self.stuck = False
        for namespace, offset, data in self.kept:
            self.namespaces[namespace].store(offset, [data])


@pytest.fixture
def agent() -> PoolAgent:
    made = MemoryPool().agent()
    made.channel = LateChannel(made.channel.namespaces)
    return made


def late(agent: PoolAgent) -> LateChannel:
    assert isinstance(agent.channel, LateChannel)
    return agent.channel


def delete(agent: PoolAgent) -> bool:
    return agent.channel.run(agent.served.delete(agent.channel, key_of(1), agent.deadline()))


def get(agent: PoolAgent) -> bytes | MissCause:
    reading, into = agent.served.reader(key_of(1)), bytearray(16384)
    target: Target = memoryview(into)
    count = agent.channel.run(reading.read(agent.channel, 0, target, agent.deadline(0.05)))
    return reading.cause if reading.cause is not None else bytes(into[:count])


@pytest.mark.parametrize("back", [False, True], ids=["through", "back"])
def test_a_delete_is_refused_while_a_write_of_the_key_may_still_land(agent: PoolAgent, back: bool) -> None:
    waiting = WriteBack(agent.volume, 1 << 20) if back else None
    agent.served = serve(agent.volume, back=waiting)
    late(agent).stuck = True
    writing = agent.served.writer(key_of(1), length=len(VALUE))
    if waiting is not None:
        agent.channel.run(writing.write(agent.channel, 0, memoryview(VALUE), agent.deadline()))
        value = waiting.oldest()
        assert value is not None
        assert not agent.channel.run(waiting.store(agent.channel, value, agent.deadline()))
    else:
        with pytest.raises(PutRefused):
            agent.channel.run(writing.write(agent.channel, 0, memoryview(VALUE), agent.deadline()))
    with pytest.raises(PutRefused, match="may still land") as refused:
        delete(agent)
    assert refused.value.cause is MissCause.LATE
    if waiting is not None:
        assert get(agent) == VALUE, "a delete that was refused leaves what waits"
    late(agent).thaw()
    agent.age_directories()
    assert get(agent) == VALUE, "it has landed"
    agent.channel.clock += COOLDOWN_SECONDS
    assert delete(agent)
    assert get(agent) in (MissCause.NEVER_STORED, MissCause.EVICTED)
    assert not delete(agent)


def test_other_keys_are_deleted_meanwhile(agent: PoolAgent) -> None:
    agent.put(key_of(2), VALUE)
    late(agent).stuck = True
    with pytest.raises(PutRefused):
        agent.put(key_of(1), VALUE)
    late(agent).thaw()
    assert agent.delete(key_of(2))


# -- what a delete sends ----------------------------------------------------------------------------------


def _crowd(agent: PoolAgent) -> dict[int, bytes]:
    """Values in every slot that a put may take."""
    stored = {}
    for number in range(2, 400):
        try:
            agent.put(key_of(number), b"%d" % number, may_evict=False)
            stored[number] = b"%d" % number
        except PutRefused:
            pass
    return stored


def _land_the_zeros(agent: PoolAgent) -> None:
    """Those for the header, which went first. A directory that is written late is no put's concern: nobody
    writes it over what may still land (agent/remote/fence.py)."""
    del late(agent).kept[1:]
    assert not any(late(agent).kept[0][2])
    late(agent).thaw()


def test_what_a_refused_delete_has_sent_lands_on_nobodys_value(agent: PoolAgent) -> None:
    agent.put(key_of(1), VALUE)
    late(agent).stuck = True
    with pytest.raises(PutRefused, match="did not delete"):
        delete(agent)
    late(agent).stuck = False
    stored = _crowd(agent)
    _land_the_zeros(agent)
    agent.age_directories()
    assert {number: agent.get(key_of(number), 3) for number in stored} == {
        number: value[:3] for number, value in stored.items()
    }
    agent.channel.clock += COOLDOWN_SECONDS
    assert delete(agent), "its entry was there still"
    assert len(_crowd(agent)) > len(stored), "its slot is used again: nothing can land there any more"


def test_no_put_takes_a_slot_while_its_delete_is_under_way(agent: PoolAgent) -> None:
    agent.put(key_of(1), VALUE)
    sets = agent.volume.borrow_sets(agent.volume.placement.pseudonym(key_of(1)))
    (found,) = agent.volume.find(sets, agent.volume.placement.pseudonym(key_of(1)))
    late(agent).stuck = True
    deleting = delete_steps(agent.volume, agent.channel, key_of(1), agent.deadline())
    wanted: Wait | Acquire = next(deleting)
    while isinstance(wanted, Acquire):
        assert wanted.lock.acquire(blocking=False)
        wanted = deleting.send(True)
    with found.cached.guard:
        assert found.cached.directory is not None
        assert found.slot in found.cached.directory.free_slots()
        assert found.slot in found.cached.unavailable(agent.channel.now()), "the zeros are on their way there"
    late(agent).answer()
    assert agent.channel.run(rest_of(deleting, True))
    with found.cached.guard:
        assert not found.cached.unavailable(agent.channel.now())
    agent.volume.give_back_sets(sets)


def test_a_key_whose_delete_may_still_land_is_stored_anew(agent: PoolAgent) -> None:
    agent.put(key_of(1), VALUE)
    late(agent).stuck = True
    with pytest.raises(PutRefused):
        delete(agent)
    late(agent).stuck = False
    agent.age_directories()
    assert get(agent) == VALUE, "flash has it still"
    assert not agent.put(key_of(1), VALUE).already_there
    _land_the_zeros(agent)
    agent.age_directories()
    assert get(agent) == VALUE


def test_a_copy_that_is_taken_back_without_an_answer_leaves_its_slot_alone() -> None:
    agent = MemoryPool(copies=2).agent()
    agent.channel = LateChannel(agent.channel.namespaces)
    agent.put(key_of(1), VALUE)
    pseudonym = agent.volume.placement.pseudonym(key_of(1))
    assert agent.channel.run(keep_two(agent.volume, agent.channel, pseudonym)) is Kept.TWO
    sets = agent.volume.borrow_sets(pseudonym)
    _, copy = agent.volume.find(sets, pseudonym)
    where = copy.cached.namespace, copy.cached.offset, copy.slot
    agent.volume.replication_backlog.doubt(
        NamedCopy(*where, pseudonym, copy.entry.generation), agent.channel.now()
    )
    late(agent).stuck = True
    agent.channel.run(work_off([agent.volume], agent.channel, 1))
    with copy.cached.guard:
        assert copy.slot in copy.cached.unavailable(agent.channel.now()), "the zeros may land yet"
    late(agent).thaw()
    agent.channel.clock += COOLDOWN_SECONDS
    agent.channel.run(work_off([agent.volume], agent.channel, 1))
    with copy.cached.guard:
        assert not copy.cached.unavailable(agent.channel.now())
    assert agent.volume.replication_backlog.doubtful == 0
    assert get(agent) == VALUE
    agent.volume.give_back_sets(sets)


def test_with_too_many_keys_all_of_them_are_unsettled() -> None:
    in_doubt = InDoubtWrites()
    for number in range(KEYS_MAX):
        in_doubt.note(number.to_bytes(16, "little"), 0.0)
    other = bytes([255]) * 16
    assert not in_doubt.may_land(other, 1.0)
    in_doubt.note(other, 1.0)
    assert in_doubt.may_land(bytes([254]) * 16, COOLDOWN_SECONDS + 0.9)
    assert not in_doubt.may_land(bytes([254]) * 16, COOLDOWN_SECONDS + 1.0)
    in_doubt.note(other, COOLDOWN_SECONDS + 2.0)
    assert in_doubt.may_land(other, COOLDOWN_SECONDS + 3.0)
    assert not in_doubt.may_land(bytes(16), COOLDOWN_SECONDS + 3.0), "the old ones made way"
