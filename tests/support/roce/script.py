"""A random conversation of two RDMA devices, and the model that says what must come of it.

Both ends write into, read from and count in an area of the other that nobody else touches, and send messages
into receives that were posted in order. So the model is one line of execution for each direction: whatever
the weather, the areas must end up as if each request had been carried out once, in order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from emulator.roce.nic.verbs import NO_SEND_FLAGS, Mtu, SendFlags, SendOpcode, WcOpcode, WcStatus
from tests.support.roce.ends import End, Pair
from tests.support.roce.weather import Weather

AREA = 4096
"""Bytes of each of the three areas of an end's memory: what the peer may change; a source of data; and where
answers and messages land."""

_TARGET, _SOURCE, _LANDING = 0, AREA, 2 * AREA

_KINDS = (
    SendOpcode.RDMA_WRITE,
    SendOpcode.RDMA_WRITE_WITH_IMM,
    SendOpcode.SEND,
    SendOpcode.SEND_WITH_IMM,
    SendOpcode.RDMA_READ,
    SendOpcode.ATOMIC_FETCH_AND_ADD,
    SendOpcode.ATOMIC_CMP_AND_SWP,
)


@dataclass
class _Direction:
    """What one end asks of the other, and what it must lead to."""

    end: End
    peer: End
    target: bytearray = field(default_factory=lambda: bytearray(AREA))
    """The peer's target area, as it must be in the end."""
    landing: bytearray = field(default_factory=lambda: bytearray(2 * AREA))
    """Our landing area, as far as answers go; messages land in the peer's second half."""
    messages: bytearray = field(default_factory=lambda: bytearray(AREA))
    sent: list[WcOpcode] = field(default_factory=list)
    received: list[tuple[int, int]] = field(default_factory=list)
    """Length and immediate data of what the peer receives."""
    fenced: bool = False
    """A READ is repeated by reading again, so what changes its data later has to wait for it (IBTA
    10.8.3.3)."""
    lengths: int = 0
    answered: int = 0


class Conversation:
    """One seed: what is said, in which weather, on which MTU."""

    def __init__(
        self,
        seed: int,
        weather: Weather,
        *,
        requests: int = 5,
        longest: int = 1500,
        parted: bool | None = None,
        numbered: bool = False,
        mtu: Mtu | None = None,
        window_bytes: int = 2048,
    ) -> None:
        self.chance = random.Random(seed)
        self.longest = longest
        self.pair = Pair(
            4 * AREA,
            weather=weather,
            seed=seed,
            parted=self.chance.random() < 0.3 if parted is None else parted,
            numbered=numbered,
            window_bytes=window_bytes,
            changes={"path_mtu": mtu or self.chance.choice((Mtu.MTU_256, Mtu.MTU_512)), "timeout": 9},
        )
        a, b = self.pair.a, self.pair.b
        for end in (a, b):
            end.memory.view[_SOURCE : _SOURCE + AREA] = self.chance.randbytes(AREA)
        self.directions = [_Direction(a, b), _Direction(b, a)]
        for direction in self.directions:
            for number in range(self.chance.randint(1, requests)):
                self._say(direction, number)

    def _say(self, d: _Direction, number: int) -> None:
        chance = self.chance
        opcode = chance.choice(_KINDS)
        size = min(self.longest, int(chance.expovariate(3 / self.longest)))
        end, peer = d.end, d.peer
        at = _SOURCE + chance.randrange(AREA - size)
        data = bytes(end.memory.view[at : at + size])
        sges = [end.sge(at, size)]
        if size > 2 and chance.random() < 0.3:
            cut = chance.randrange(1, size)
            sges = [end.sge(at, cut), end.sge(at + cut, size - cut)]
        imm = number + 1
        flags = SendFlags.SIGNALED | (SendFlags.FENCE if d.fenced else NO_SEND_FLAGS)
        if opcode in (SendOpcode.SEND, SendOpcode.SEND_WITH_IMM):
            room = AREA - d.lengths
            if size > room:
                return
            peer.receive(peer.sge(_LANDING + AREA + d.lengths, size), wr_id=number)
            d.messages[d.lengths : d.lengths + size] = data
            d.lengths += size
            d.received.append((size, imm if opcode is SendOpcode.SEND_WITH_IMM else 0))
            end.post(opcode, *sges, wr_id=number, imm=imm if opcode is SendOpcode.SEND_WITH_IMM else 0)
            d.sent.append(WcOpcode.SEND)
        elif opcode in (SendOpcode.RDMA_WRITE, SendOpcode.RDMA_WRITE_WITH_IMM):
            to = chance.randrange(AREA - size)
            d.target[to : to + size] = data
            if opcode is SendOpcode.RDMA_WRITE_WITH_IMM:
                peer.receive(wr_id=number)
                d.received.append((size, imm))
            end.post(opcode, *sges, wr_id=number, flags=flags, to=peer, at=_TARGET + to, imm=imm)
            d.fenced = False
            d.sent.append(WcOpcode.RDMA_WRITE)
        elif opcode is SendOpcode.RDMA_READ:
            if size > AREA - d.answered:
                return
            # Half of the reads see what was written before them, the others data that never change.
            base = _TARGET if chance.random() < 0.5 else _SOURCE
            d.fenced |= base == _TARGET
            at = chance.randrange(AREA - size)
            area = d.target if base == _TARGET else peer.memory.view[_SOURCE : _SOURCE + AREA]
            d.landing[d.answered : d.answered + size] = area[at : at + size]
            end.post(opcode, end.sge(_LANDING + d.answered, size), wr_id=number, to=peer, at=base + at)
            d.answered += size
            d.sent.append(WcOpcode.RDMA_READ)
        else:
            if d.answered + 8 > AREA:
                return
            at = 8 * chance.randrange(AREA // 8)
            before = int.from_bytes(d.target[at : at + 8], "little")
            adding = opcode is SendOpcode.ATOMIC_FETCH_AND_ADD
            operand = chance.getrandbits(64) if adding or chance.random() < 0.3 else before
            swap = chance.getrandbits(64)
            after = before + operand & (1 << 64) - 1 if adding else swap if before == operand else before
            d.target[at : at + 8] = after.to_bytes(8, "little")
            d.landing[d.answered : d.answered + 8] = before.to_bytes(8, "little")
            end.post(
                opcode,
                end.sge(_LANDING + d.answered, 8),
                wr_id=number,
                to=peer,
                at=_TARGET + at,
                compare_add=operand,
                swap=swap,
                flags=flags,
            )
            d.fenced = False
            d.answered += 8
            d.sent.append(WcOpcode.FETCH_ADD if adding else WcOpcode.COMP_SWAP)

    def run(self) -> None:
        """Until all is said and done; AssertionError where anything is not as it must be."""
        first, second = self.directions
        wanted = [len(first.sent) + len(second.received), len(second.sent) + len(first.received)]
        done = self.pair.network.run(
            lambda: len(first.end.cq) >= wanted[0] and len(second.end.cq) >= wanted[1], most_seconds=30.0
        )
        assert done, f"{len(first.end.cq)} and {len(second.end.cq)} of {wanted} completions"
        # Whatever is still under way (duplicates above all) must change nothing any more.
        self.pair.network.run(most_seconds=1.0)
        for mine, other in ((first, second), (second, first)):
            self._check(mine, other)

    def _check(self, mine: _Direction, other: _Direction) -> None:
        end = mine.end
        completions = end.polled()
        failed = [c for c in completions if c.status is not WcStatus.SUCCESS]
        assert not failed, failed
        sends = [c for c in completions if not c.opcode & 128]
        receives = [c for c in completions if c.opcode & 128]
        assert [c.opcode for c in sends] == mine.sent
        assert [(c.byte_len, c.imm) for c in receives] == other.received
        view = end.memory.view
        assert view[_TARGET : _TARGET + AREA] == other.target, "what the peer wrote"
        assert view[_LANDING : _LANDING + mine.answered] == mine.landing[: mine.answered], "what was read"
        landed = view[_LANDING + AREA : _LANDING + AREA + other.lengths]
        assert landed == other.messages[: other.lengths], "what was received"
        assert end.memory.intact
