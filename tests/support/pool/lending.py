"""Two processes of an agent in memory: one lends slots and names values, the other writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agent.pool.errors import BadPut, PutElsewhere, PutRefused
from agent.pool.write.batch import Became, Untried
from agent.pool.write.borrowed_slots import SlotLink, write_borrowed
from agent.pool.write.lent_slots import LentSlots
from agent.pool.write.slot_messages import (
    End,
    Ended,
    Kind,
    LentSlot,
    decode_ask,
    decode_written,
    encode_ended,
    encode_places,
    end_of,
)
from agent.remote.fence import GIVEN_UP_SECONDS, Fence
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of


class Died(Exception):
    """The process that borrows has ended where it stood."""


class NoFence:
    """Of a lender none of whose slots may be written late."""

    def stands(self, namespace: int, offset: int, size: int, now: float) -> bool:
        return False

    def put_up(self, namespace: int, offset: int, size: int, now: float) -> None:
        """Nothing."""


class Lending:
    """Both, and all their links. `before` is called with each message's kind before it is answered."""

    def __init__(self, sets: tuple[int, ...] = (1, 1), **settings: object) -> None:
        self.pool = MemoryPool(sets, **({"value_bytes": 131072} | settings))
        self.first, self.reader = self.pool.agent(), self.pool.agent()
        self.before: Callable[[Kind], None] = lambda kind: None
        self.fence = Fence()
        self.fenced: Callable[[int, int, int], bool] = lambda namespace, offset, size: False
        self.asked: list[Kind] = []
        self.broken_links = 0
        self.was_sent = False
        """What the borrower's own fence says of a write that failed at once."""
        self.lends = True
        self.values_least = 1
        self.is_patient = True
        self.slots: LentSlots | None = None

    # -- the lender's fence ----------------------------------------------------------------------------------

    def stands(self, namespace: int, offset: int, size: int, now: float) -> bool:
        is_up = self.fence.stands(_nguid(namespace), offset, size, now)
        return is_up or self.fenced(namespace, offset, size)

    def put_up(self, namespace: int, offset: int, size: int, now: float) -> None:
        self.fence.put_up(_nguid(namespace), offset, size, now + GIVEN_UP_SECONDS, now)

    # -- what the borrower sees --------------------------------------------------------------------------

    @contextlib.contextmanager
    def take(self, values: int) -> Iterator[SlotLink]:
        if values < self.values_least:
            raise PutElsewhere
        yield self

    def namespace(self, nguid: bytes) -> int | None:
        numbers = {each.nguid: each.namespace for each in self.pool.settings.extents}
        return numbers.get(nguid)

    def may_land(self, namespace: int, offset: int, size: int, now: float) -> bool:
        return self.was_sent

    def broken(self) -> None:
        self.broken_links += 1

    def exchange(self, message: bytes) -> bytes:
        kind = Kind(message[0])
        self.asked.append(kind)
        self.before(kind)
        self.first.channel.clock = max(self.first.channel.clock, self.reader.channel.clock)
        answer = self._answer(kind, message)
        self.reader.channel.clock = max(self.first.channel.clock, self.reader.channel.clock)
        return answer

    def _answer(self, kind: Kind, message: bytes) -> bytes:
        run = self.first.channel.run
        if kind is Kind.ASK:
            ask = decode_ask(message)
            if not self.lends:
                return encode_places([(End.ELSEWHERE, None)] * len(ask.values))
            self.slots = LentSlots(
                self.first.volume, self.first.channel, ask.values, ask.seconds, ask.ttl_seconds, self,
                ask.is_patient,
            )  # fmt: skip
            places = run(self.slots.lend())
            answer = encode_places([p if isinstance(p, LentSlot) else ended(p) for p in places])
        else:
            assert self.slots is not None
            answer = encode_ended([ended(each) for each in run(self.slots.name(decode_written(message)))])
        if not self.slots.out:
            self.close()
        return answer

    def close(self) -> None:
        """The call is over, or the borrower has ended."""
        if self.slots is not None:
            self.slots.close()
            self.slots = None

    # -- what a client asks for -----------------------------------------------------------------------------

    def steps(self, numbers: Sequence[int], seconds: float = 5.0, ttl: int = 0) -> Any:
        keys, values = [key_of(n) for n in numbers], [memoryview(content(n)) for n in numbers]
        return write_borrowed(self.reader.volume, self.reader.channel, self, keys, values, seconds, ttl)

    def put(self, numbers: Sequence[int], seconds: float = 5.0, ttl: int = 0) -> list[Became]:
        became: list[Became] = self.reader.channel.run(self.steps(numbers, seconds, ttl))
        return became

    def nothing_is_held(self) -> None:
        nothing_is_held(self.first)
        nothing_is_held(self.reader)


def _nguid(namespace: int) -> bytes:
    return namespace.to_bytes(16, "big")


def content(number: int) -> bytes:
    return bytes([number % 251]) * (1 + number * 977 % 70_000)


def nothing_is_held(agent: PoolAgent) -> None:
    assert not len(agent.volume.key_locks)
    assert not len(agent.volume.puts_in_pieces)
    for cached in agent.cache.snapshot():
        assert not cached.users
        assert not cached.reserved
        assert not cached.unnamed
        assert not cached.writer.locked()


def ended(became: Became) -> Ended:
    if isinstance(became, PutRefused | BadPut):
        return end_of(became)
    if isinstance(became, Untried):
        return End.UNTRIED, None
    return (End.STORED if became else End.THERE_BEFORE), None
