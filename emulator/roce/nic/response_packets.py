"""What a responder still has to send, in order: acknowledgements, answers of READs and of atomics.

One row for all of them, because an acknowledgement that overtook the answer of an earlier READ would tell the
requester that this answer is lost. An acknowledgement speaks for all before it, so two in a row are one.

Bound: `max_dest_rd_atomic` answers, and an acknowledgement after each.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from emulator.roce.nic.counters import Count
from emulator.roce.nic.memory import ProtectionFault, SpanList
from emulator.roce.nic.qp_context import QpContext
from emulator.roce.nic.verbs import Burst
from emulator.roce.wire.bth import LOW_24_BITS
from emulator.roce.wire.extended import AETH, ATOMIC_ACK_ETH, SYNDROME_ACK, NakCode, nak_syndrome
from emulator.roce.wire.opcodes import Opcode


@dataclass(slots=True)
class Acknowledgement:
    """ACK, NAK or RNR NAK, by its syndrome."""

    psn: int
    syndrome: int
    messages: int


@dataclass(slots=True)
class AtomicAnswer:
    """The eight bytes as they were."""

    psn: int
    original: int
    messages: int


@dataclass(slots=True)
class ReadAnswer:
    """Packets `psn` to `end` - 1, of which `psn` is the next to go; they carry `length` bytes of `spans` from
    `offset` on. `begun` once the first has gone; `again` where the peer may have had them all before."""

    psn: int
    end: int
    spans: SpanList
    offset: int
    length: int
    messages: int
    again: bool = False
    begun: bool = False


Answer: TypeAlias = Acknowledgement | AtomicAnswer | ReadAnswer


class Responses:
    """See the module's docstring."""

    def __init__(self, qp: QpContext) -> None:
        self._qp = qp
        self._row: deque[Answer] = deque()

    def __len__(self) -> int:
        return len(self._row)

    def clear(self) -> None:
        """Nothing of it is sent."""
        self._row.clear()

    def acknowledge(self, psn: int, messages: int, syndrome: int = SYNDROME_ACK) -> None:
        """ACK, or refuse, everything up to `psn`."""
        last = self._row[-1] if self._row else None
        if isinstance(last, Acknowledgement):
            # Also in place of a NAK: what it asked for has come, or it would be the end of the queue pair.
            last.psn, last.messages, last.syndrome = psn, messages, syndrome
        else:
            self._row.append(Acknowledgement(psn, syndrome, messages))
        self._qp.schedule()

    def answer(self, answer: AtomicAnswer | ReadAnswer) -> None:
        """Send the answer of an atomic or a READ. One that is still going out starts again where the
        requester wants it to; what is too much is dropped, and asked for again."""
        for index, waiting in enumerate(self._row):
            if isinstance(answer, ReadAnswer) and isinstance(waiting, ReadAnswer):
                if waiting.end == answer.end:
                    if answer.psn < waiting.psn:
                        self._row[index] = answer
                    return
            elif isinstance(waiting, AtomicAnswer) and waiting.psn == answer.psn:
                return
        if len(self._row) > 2 * self._qp.attributes.max_dest_rd_atomic:
            return
        self._row.append(answer)
        self._qp.schedule()

    def next_burst(self) -> Burst | None:
        """The next packets."""
        while self._row:
            head = self._row[0]
            if not isinstance(head, ReadAnswer):
                self._row.popleft()
                return self._packet(head)
            try:
                return self._read_packets(head)
            except ProtectionFault:
                if head.again:
                    # As with a duplicate that comes now: the peer may have had it, and so the key has gone.
                    self._qp.device.counters[Count.NO_RESOURCE] += 1
                    self._row.popleft()
                    continue
                # The memory went while it was read: the peer's access has become invalid.
                self._row.clear()
                syndrome = nak_syndrome(NakCode.REMOTE_ACCESS_ERROR)
                self._qp.responder_failed()
                return self._packet(Acknowledgement(head.psn, syndrome, head.messages))
        return None

    def _packet(self, head: Acknowledgement | AtomicAnswer) -> Burst:
        extended = AETH.pack(self._syndrome_word(head))
        opcode = Opcode.ACKNOWLEDGE
        if isinstance(head, AtomicAnswer):
            opcode = Opcode.ATOMIC_ACKNOWLEDGE
            extended += ATOMIC_ACK_ETH.pack(head.original)
        return self._qp.device.writer.single(
            self._qp.path, opcode, self._qp.attributes.dest_qpn, head.psn, extended
        )

    def _syndrome_word(self, answer: Answer) -> int:
        syndrome = answer.syndrome if isinstance(answer, Acknowledgement) else SYNDROME_ACK
        return syndrome << 24 | answer.messages & LOW_24_BITS

    def _read_packets(self, answer: ReadAnswer) -> Burst:
        qp = self._qp
        mtu, left = qp.mtu, answer.end - answer.psn
        # First and last carry an AETH, so they are no part of a row.
        most = min(qp.device.volley_packets(qp.path, mtu), left - 1)
        if answer.begun and most > 1:
            source = answer.spans.contiguous(answer.offset, most * mtu)
            count = len(source) // mtu
            if count > 1:
                psn = answer.psn
                answer.psn += count
                answer.offset += count * mtu
                answer.length -= count * mtu
                return qp.device.writer.rows(
                    qp.path,
                    mtu,
                    Opcode.READ_RESPONSE_MIDDLE,
                    qp.attributes.dest_qpn,
                    psn,
                    source[: count * mtu],
                )
        if left == 1:
            opcode = Opcode.READ_RESPONSE_LAST if answer.begun else Opcode.READ_RESPONSE_ONLY
        else:
            opcode = Opcode.READ_RESPONSE_MIDDLE if answer.begun else Opcode.READ_RESPONSE_FIRST
        with_aeth = opcode is not Opcode.READ_RESPONSE_MIDDLE
        length = min(mtu, answer.length)
        burst = qp.device.writer.single(
            qp.path,
            opcode,
            qp.attributes.dest_qpn,
            answer.psn,
            AETH.pack(self._syndrome_word(answer)) if with_aeth else b"",
            spans=answer.spans,
            start=answer.offset,
            length=length,
        )
        answer.begun = True
        answer.psn += 1
        answer.offset += length
        answer.length -= length
        if left == 1:
            self._row.popleft()
        return burst
