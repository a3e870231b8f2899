"""Locks whose holder may wait for a drive: who waits for one counts among its door's long waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent.fs.control.session import Ticket
from agent.pool.steps import Acquire, Steps
from agent.pool.write.write_back import Waiting, WriteBack
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

VALUE = memoryview(bytes(100))


def put_at_a_ticket(agent: PoolAgent) -> Steps[Any]:
    """Another request has written to the ticket, and its put waits."""
    ticket = Ticket(agent.served, key_of(1), None, 200)
    ticket.lock.acquire()
    return ticket.put(agent.channel, 100, VALUE)


def held_back(agent: PoolAgent) -> tuple[WriteBack, Waiting]:
    """A value that waits, and is being stored."""
    value = Waiting(key_of(1), agent.volume.placement.pseudonym(key_of(1)), VALUE, 0, agent.channel.now())
    value.lock.acquire()
    return WriteBack(agent.volume, 1 << 20), value


def delete_of_what_waits(agent: PoolAgent) -> Steps[Any]:
    back, value = held_back(agent)
    return back.delete(agent.channel, value, agent.deadline())


def pin_of_what_waits(agent: PoolAgent) -> Steps[Any]:
    back, value = held_back(agent)
    return back.pin(value, 0, agent.deadline())


@pytest.mark.parametrize("steps_of", [put_at_a_ticket, delete_of_what_waits, pin_of_what_waits])
def test_a_lock_whose_holder_waits_for_a_drive_gives_way(steps_of: Callable[[PoolAgent], Steps[Any]]) -> None:
    wanted = next(steps_of(MemoryPool().agent()))
    assert isinstance(wanted, Acquire)
    assert wanted.gives_way
