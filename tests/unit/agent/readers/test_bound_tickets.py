"""Tickets that were bound at a reader, and the question whether it may serve their volume, asked anew."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from agent.fs.control.registered_memory import RegisteredMemory
from host_shim.pool import Pool
from host_shim.session_files import Refusal
from tests.support.engines.counted_door import KIB, Counted, agent_with, filled
from tests.support.pool.memory_pool import key_of


class Reader(Counted):
    """The door of a process that serves gets alone, as long as it `may`."""

    may = True

    def serve_alone(self) -> None:
        self.face._may_read = lambda volume: self.may


@pytest.fixture
def door() -> Iterator[Reader]:
    memory = RegisteredMemory(1 << 24)
    yield Reader(agent_with(), memory)
    memory.close()


@pytest.mark.parametrize("was_read", [False, True])
@pytest.mark.parametrize("is_registered", [False, True])
def test_a_ticket_is_served_only_while_its_volume_is(
    door: Reader, *, was_read: bool, is_registered: bool
) -> None:
    """The tenant may have a rate since, which is kept to by the process that all of its gets come by."""
    with Pool("/mnt", files=door, parallel=1) as pool:
        filled(pool, 4)
        door.serve_alone()
        into = pool.memory(64 * KIB) if is_registered else memoryview(bytearray(64 * KIB))
        with pool._lender.lend() as session:
            assert session is not None
            session.bind_reads("v", [key_of(number) for number in range(4)])
            if was_read:
                assert session.read(3, into) == 4096
            door.may = False
            with pytest.raises(Refusal) as refused:
                session.read(3, into)
            assert refused.value.errno == errno.EREMOTE, os.strerror(refused.value.errno or 0)
            door.may = True
            assert session.read(3, into) == 4096
