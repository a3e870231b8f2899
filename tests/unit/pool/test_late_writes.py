"""A write that nobody answered for lands late: a key that was deleted meanwhile must not come back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agent.inline.scatter import Target
from agent.pool.directory_cache import SHUN_SECONDS
from agent.pool.operations import delete_value, new_reading, new_writing
from agent.pool.steps import Buffer
from agent.pool.tally import MissCause
from agent.pool.unsettled import KEYS_MAX, Unsettled
from agent.pool.write_back import WriteBack
from agent.pool.writing import PutRefused
from tests.support.memory_lanes import MemoryLanes, MemoryNamespace, MemoryPending
from tests.support.memory_pool import MemoryPool, PoolAgent, key_of

VALUE = bytes(range(250)) * 30


class LateLanes(MemoryLanes):
    """Writes are not answered while `stuck`, and land with `thaw`."""

    def __init__(self, namespaces: Sequence[MemoryNamespace]) -> None:
        super().__init__(namespaces)
        self.stuck = False
        self.kept: list[tuple[int, int, bytes]] = []

    def write(
        self, namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False
    ) -> MemoryPending:
        if not self.stuck:
            return super().write(namespace, offset, parts, more=more)
        self.kept.append((namespace, offset, b"".join(bytes(part) for part in parts)))
        return MemoryPending()

    def thaw(self) -> None:
        self.stuck = False
        for namespace, offset, data in self.kept:
            self.namespaces[namespace].store(offset, [data])


@pytest.fixture
def agent() -> PoolAgent:
    made = MemoryPool().agent()
    made.lanes = LateLanes(made.lanes.namespaces)
    return made


def late(agent: PoolAgent) -> LateLanes:
    assert isinstance(agent.lanes, LateLanes)
    return agent.lanes


def delete(agent: PoolAgent) -> bool:
    return agent.lanes.run(delete_value(agent.volume, agent.lanes, key_of(1), agent.deadline()))


def get(agent: PoolAgent) -> bytes | MissCause:
    reading, into = new_reading(agent.volume, key_of(1)), bytearray(16384)
    target: Target = memoryview(into)
    count = agent.lanes.run(reading.read(agent.lanes, 0, target, agent.deadline(0.05)))
    return reading.cause if reading.cause is not None else bytes(into[:count])


@pytest.mark.parametrize("back", [False, True], ids=["through", "back"])
def test_a_delete_is_refused_while_a_write_of_the_key_may_still_land(agent: PoolAgent, back: bool) -> None:
    waiting = agent.volume.back = WriteBack(agent.volume, 1 << 20) if back else None
    late(agent).stuck = True
    writing = new_writing(agent.volume, key_of(1), length=len(VALUE))
    if waiting is not None:
        agent.lanes.run(writing.write(agent.lanes, 0, memoryview(VALUE), agent.deadline()))
        value = waiting.oldest()
        assert value is not None
        assert not agent.lanes.run(waiting.store(agent.lanes, value, agent.deadline()))
    else:
        with pytest.raises(PutRefused):
            agent.lanes.run(writing.write(agent.lanes, 0, memoryview(VALUE), agent.deadline()))
    with pytest.raises(PutRefused, match="may still land") as refused:
        delete(agent)
    assert refused.value.cause is MissCause.LATE
    if waiting is not None:
        assert get(agent) == VALUE, "a delete that was refused leaves what waits"
    late(agent).thaw()
    agent.age_directories()
    assert get(agent) == VALUE, "it has landed"
    agent.lanes.clock += SHUN_SECONDS
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


def test_with_too_many_keys_all_of_them_are_unsettled() -> None:
    unsettled = Unsettled()
    for number in range(KEYS_MAX):
        unsettled.note(number.to_bytes(16, "little"), 0.0)
    other = bytes([255]) * 16
    assert not unsettled.stands(other, 1.0)
    unsettled.note(other, 1.0)
    assert unsettled.stands(bytes([254]) * 16, SHUN_SECONDS + 0.9)
    assert not unsettled.stands(bytes([254]) * 16, SHUN_SECONDS + 1.0)
    unsettled.note(other, SHUN_SECONDS + 2.0)
    assert unsettled.stands(other, SHUN_SECONDS + 3.0)
    assert not unsettled.stands(bytes(16), SHUN_SECONDS + 3.0), "the old ones made way"
