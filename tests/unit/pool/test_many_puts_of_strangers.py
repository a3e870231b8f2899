"""Requests for many values that no shim sends, and a shim beside an agent that knows no such requests."""

from __future__ import annotations

import pytest

from agent.fs.control.registered_memory import RegisteredMemory
from host_shim.pool import Pool
from host_shim.transfer_wire import SHORT_BYTES, TOGETHER_BYTES, Ioctl, encode_many, ioctl_command
from tests.support.engines.counted_door import Counted, agent_with
from tests.support.pool.lending import nothing_is_held
from tests.support.pool.memory_pool import key_of


def test_an_agent_of_before_is_put_to_one_by_one(memory: RegisteredMemory) -> None:
    agent = agent_with()
    door = Counted(agent, memory)
    door.old = True
    with Pool("/nowhere", files=door) as pool:
        volume = pool.volume("v")
        assert volume.put_many([key_of(n) for n in range(6)], [b"x" * 100] * 6) == [True] * 6
        assert "STORE_MANY" not in door.asked
    assert agent.tally.puts == 6


@pytest.mark.parametrize("which", [Ioctl.LOAD_MANY, Ioctl.STORE_MANY])
@pytest.mark.parametrize(
    ("parts", "ttl", "why"),
    [
        ([(1, 0, 100), (9, 0, 1)], 0, "no region"),
        ([(1, 0, 100), (1, 8 << 20, 1)], 0, "no region"),
        ([(1, 0, SHORT_BYTES + 1)], 0, "at most"),
        ([(1, 0, SHORT_BYTES)] * (TOGETHER_BYTES // SHORT_BYTES + 1), 0, "at most"),
        ([(1, 0, 100)], 60, "time to live"),
    ],
)
def test_what_is_refused(
    which: Ioctl, parts: list[tuple[int, int, int]], ttl: int, why: str, memory: RegisteredMemory
) -> None:
    of_stores = why == "at most"
    if of_stores is (which is Ioctl.LOAD_MANY) and why != "no region":
        return  # that is allowed
    if why == "time to live" and which is Ioctl.STORE_MANY:
        return
    agent = agent_with()
    door = Counted(agent, memory)
    with Pool("/nowhere", files=door) as pool:
        volume = pool.volume("v")
        whole = pool.memory(8 << 20)
        volume.put_many([key_of(0), key_of(1)], [whole[:10], whole[100:200]])
        session = pool._lender.take()
        assert session is not None
        data = encode_many("v", [key_of(2 + n) for n in range(len(parts))], parts, ttl)
        with pytest.raises(OSError, match=why):
            door.ioctl(session._descriptor, ioctl_command(which, len(data)), data)
        pool._lender.free.append(session)
    nothing_is_held(agent)
