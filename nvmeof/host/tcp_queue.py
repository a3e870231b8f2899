"""One NVMe/TCP queue of the host role, without I/O. Read `tcp/receiver.py` and `command.py` first.

    queue = TcpQueue(depth=32, digests=Digests(), in_capsule_bytes=8192)
    queue.start()                     # ICReq is in `output`; until ICResp came, `ready` is False
    queue.submit(command, now)        # its capsule is in `output`
    sock.sendmsg(queue.output); queue.sent(n)
    n = sock.recv_into(queue.next_buffer()); ended = queue.received(n)

What drives it: calls of submit, abandon and fail, and the bytes of the peer. It has no clock and no retry:
a queue that has failed is over, and its owner makes a new one.

Data of a command go straight into its `data_in`. Data of the host go out from its own buffers: in the
capsule where they fit into `in_capsule_bytes`, otherwise when the controller asks (R2T).
"""
# One idea in one file: `TcpQueue`, whose commands and stream all of its methods share.

import struct
from collections.abc import Sequence
from enum import Enum
from typing import Final

from nvmeof.errors import (
    FatalErrorStatus,
    LocalProtocolError,
    MalformedPdu,
    QueueFull,
    RemoteProtocolError,
)
from nvmeof.host.command import CID_COUNT, Command
from nvmeof.limits import (
    DISCARD_BYTES,
    EXPECTED_BYTES,
    MAX_OUTSTANDING_R2T,
    MAX_QUEUE_DEPTH,
    MIN_MAXH2CDATA,
    SHORT_PAYLOAD_BYTES,
    UNEXPECTED_ANSWERS,
)
from nvmeof.tcp.crc32c import Buffer, crc32c
from nvmeof.tcp.pdu import (
    CAPSULE_CMD,
    DIGEST,
    FLAG_DATA_DIGEST,
    FLAG_HEADER_DIGEST,
    FROM_CONTROLLER,
    NO_DIGESTS,
    R2T,
    C2HData,
    CapsuleResp,
    DataPdu,
    Digests,
    H2CData,
    ICReq,
    ICResp,
    TermReq,
    alignment_bytes,
    encode_header,
    encode_pdu,
    termination_for,
)
from nvmeof.tcp.receiver import EXPECTED_MAX, BadDataDigest, Event, Expected, PduReceiver
from nvmeof.wire.cqe import Cqe
from nvmeof.wire.sgl import SGL_IN_CAPSULE
from nvmeof.wire.sqe import FLAGS_SGL
from nvmeof.wire.status import Status

CAPSULE: Final = struct.Struct("<BBBBIBBHIIIQQQQQQ")
"""The common header and the submission entry in one, because this is packed for every command; a Q has the
command dwords 10 and 11, and so on."""
assert CAPSULE.size == 72

SGL_TRANSPORT: Final = 0x5A << 56
"""The high half of the descriptor of other data, less their length (`wire/sgl.py`)."""

_SUCCESS: Final[int] = Status.SUCCESS.value


class QueueState(Enum):
    """The life of a queue; there is no way back."""

    NEW = "new"
    INITIALIZING = "initializing"
    READY = "ready"
    FAILED = "failed"


LEGAL: Final = {
    (QueueState.NEW, QueueState.INITIALIZING),
    (QueueState.INITIALIZING, QueueState.READY),
    (QueueState.NEW, QueueState.FAILED),
    (QueueState.INITIALIZING, QueueState.FAILED),
    (QueueState.READY, QueueState.FAILED),
}


class TcpQueue:
    """See the top of this file. Used by one thread or task."""

    def __init__(
        self,
        depth: int,
        *,
        digests: Digests = NO_DIGESTS,
        in_capsule_bytes: int = 0,
        required: Digests | None = None,
    ) -> None:
        """`digests` are asked for; the controller may decline those that are not `required`, None: none."""
        if not 1 <= depth <= MAX_QUEUE_DEPTH:
            raise LocalProtocolError(f"a queue of depth {depth}")
        self.depth = depth
        self.in_capsule_bytes = in_capsule_bytes
        """Data of the host up to this size travel in the capsule: (IOCCSZ * 16) - 64, or 8192 on queue 0."""
        self.state = QueueState.NEW
        self.output: list[Buffer] = []
        """What to send, in order. The owner sends it and says `sent`."""
        self.receiving: Command | None = None
        """The command whose data are arriving: more are certain to come, straight into its buffer."""
        self._wanted = digests
        self._required = digests if required is None else required
        self._digests = NO_DIGESTS
        self._alignment = 4
        self._max_h2c_data = MIN_MAXH2CDATA
        self._commands: dict[int, Command] = {}
        self._next_cid = 0
        self._long_answers = 0
        """Commands in flight whose answers are no short payloads."""
        self.abandoned = 0
        """Commands in flight that nobody waits for."""
        # Positions in the stream that goes out: how far it has been written, and how far sent.
        self._queued = 0
        self._sent = 0
        self._discard: memoryview | None = None
        self._receiver = PduReceiver(self, FROM_CONTROLLER)
        self.next_buffer = self._receiver.next_buffer
        self._unexpected = 0
        """How many answers are still to come before their order is believed in again."""

    @property
    def ready(self) -> bool:
        """The connection is initialized and commands may be submitted."""
        return self.state is QueueState.READY

    @property
    def in_flight(self) -> int:
        """Commands without an end, the abandoned ones included."""
        return len(self._commands)

    @property
    def mid_pdu(self) -> bool:
        """The stream must not end here."""
        return self._receiver.mid_pdu

    def oldest_abandoned(self, heard: int | None = None) -> float | None:
        """When the oldest command was submitted that was abandoned and has not been answered.

        `heard`: of those alone that were submitted when the owner had heard so much.
        """
        oldest: float | None = None
        if not self.abandoned:
            return None  # as each request asks that, of all that are in flight
        for command in self._commands.values():
            if heard is not None and command.heard != heard:
                continue
            if command.abandoned and (oldest is None or command.submitted_at < oldest):
                oldest = command.submitted_at
        return oldest

    def _become(self, state: QueueState) -> None:
        if (self.state, state) not in LEGAL:
            raise LocalProtocolError(f"a host queue cannot go from {self.state.value} to {state.value}")
        self.state = state

    def start(self) -> None:
        self._become(QueueState.INITIALIZING)
        request = encode_header(ICReq(self._wanted.header, self._wanted.data, MAX_OUTSTANDING_R2T - 1))
        self.output.append(request)
        self._queued += len(request)

    def fail(self, reason: str) -> list[Command]:
        """The connection is over: every command in flight ends, lost. The first call counts.

        Returns those that somebody still waits for.
        """
        if self.state is QueueState.FAILED:
            return []
        self._become(QueueState.FAILED)
        self.output = []
        self.receiving = None
        ended = []
        for command in self._commands.values():
            if command.abandoned:
                command.data_out = ()
                command.orphaned = True
            else:
                command.lose(reason)
                ended.append(command)
        self._commands = {}
        self._long_answers = self.abandoned = 0
        return ended

    def termination(self, error: RemoteProtocolError) -> bytes | None:
        """The termination request that `error`, raised by `received`, deserves."""
        return termination_for(error, from_host=True, header=self._receiver.wrong_header)

    def submit(self, command: Command, now: float) -> None:
        """Put a command into `output`. Raises `QueueFull` and `LocalProtocolError`, then nothing happened."""
        if self.state is not QueueState.READY:
            raise LocalProtocolError(f"a host queue that is {self.state.value} takes no command")
        if len(self._commands) >= self.depth:
            raise QueueFull(f"{self.depth} commands are in flight")
        if command.cid != -1:
            raise LocalProtocolError(f"{command!r} was submitted before")
        cid = self._next_cid
        while cid in self._commands:
            cid = (cid + 1) % CID_COUNT
        self._next_cid = (cid + 1) % CID_COUNT
        command.cid = cid
        command.submitted_at = now
        self._commands[cid] = command
        if command.in_bytes > SHORT_PAYLOAD_BYTES:
            self._long_answers += 1
            self._receiver.awaits_long = True

        size = command.out_bytes
        inside = 0
        if size:
            sgl = SGL_TRANSPORT | size
            if size <= self.in_capsule_bytes or command.in_capsule:
                inside = size
                sgl = SGL_IN_CAPSULE | size
                command.requested = size
        else:
            sgl = SGL_TRANSPORT | command.in_bytes
        digests = self._digests
        flags = offset = 0
        start = 72
        if digests.header:
            flags = FLAG_HEADER_DIGEST
            start = 76
        total = start
        if inside:
            total = offset = -(-start // self._alignment) * self._alignment
            total += inside
            if digests.data:
                flags |= FLAG_DATA_DIGEST
                total += 4
        header = CAPSULE.pack(
            CAPSULE_CMD, flags, 72, offset, total,
            command.opcode, FLAGS_SGL, cid, command.nsid, command.cdw2, command.cdw3, 0, 0, sgl,
            command.cdw10 | command.cdw11 << 32, command.cdw12 | command.cdw13 << 32,
            command.cdw14 | command.cdw15 << 32,
        )  # fmt: skip
        if digests.header:
            header += DIGEST.pack(crc32c(header))
        output = self.output
        self._queued += total
        if not inside:
            output.append(header)
            return
        command.out_end = self._queued
        output.append(header.ljust(offset, b"\0"))
        output.extend(command.data_out)
        if digests.data:
            digest = 0
            for part in command.data_out:
                digest = crc32c(part, digest)
            output.append(DIGEST.pack(digest))

    def sent(self, count: int) -> None:
        """`count` bytes of `output` are with the kernel."""
        self._sent += count
        output = self.output
        index = 0
        while index < len(output) and count >= len(output[index]):
            count -= len(output[index])
            index += 1
        del output[:index]
        if count:
            output[0] = memoryview(output[0])[count:]

    def abandon(self, command: Command) -> None:
        """Nobody waits for it any more: its buffers are not touched again, its end is swallowed.

        What the controller sends for it is thrown away; a write that the controller may yet ask data of
        keeps a copy of them. Both cost memory or time only in this rare case, and both are bounded: by
        `DISCARD_BYTES`, and by the depth of the queue times the largest transfer.
        """
        if command.done or command.abandoned:
            return
        if self._commands.get(command.cid) is not command:
            raise LocalProtocolError(f"{command!r} is not in flight here")
        command.abandoned = True
        self.abandoned += 1
        if command.out_bytes:
            self._detach(command)
            if command.requested < command.out_bytes:
                command.data_out = [bytes(part) for part in command.data_out]
            else:
                command.data_out = ()
        command.data_in = None
        if self.receiving is command and self._receiver.payload_left:
            self._receiver.redirect(self._discards(self._receiver.payload_left))

    def _detach(self, command: Command) -> None:
        """Let `output` own its bytes, if some of them are still this command's.

        The owner of an ended or abandoned command may put anything into its buffers next, plaintext
        included, and none of that may reach the wire.
        """
        if command.out_end <= self._sent:
            return
        self.output = [part if isinstance(part, bytes) else bytes(part) for part in self.output]

    def next_buffers(self) -> list[memoryview]:
        """Where the next bytes go, for one call that receives many answers (`PduReceiver.next_buffers`)."""
        return self._receiver.next_buffers(self._expected() if self._unexpected <= 0 else ())

    def _expected(self) -> list[Expected]:
        """The answers that come next if the controller answers in the order of its commands: reads that are
        not long, some of them."""
        expected: list[Expected] = []
        room = EXPECTED_BYTES
        for command in self._commands.values():
            place = command.data_in
            if place is None:
                break  # a write, or one that was abandoned: more of its data may come, here as well
            if command is self.receiving:
                continue
            if command.transferred or command.may_be_short or command.result_is_length:
                break
            room -= command.in_bytes
            if room < 0 or len(expected) == EXPECTED_MAX:
                break
            expected.append((command.cid, place))
        return expected

    def received(self, count: int) -> list[Command]:
        """`count` bytes are in the buffer that `next_buffer` or `next_buffers` gave; the commands that they
        ended.

        Raises `RemoteProtocolError`; the owner sends the `termination`, hangs up and calls `fail`.
        """
        receiver = self._receiver
        surprises = receiver.surprises
        events = receiver.received(count)
        if receiver.surprises != surprises:
            self._unexpected = UNEXPECTED_ANSWERS
        ended: list[Command] = []
        for event in events:
            self._apply(event, ended)
        pdu = receiver.pdu
        if pdu is None or not receiver.payload_left:
            self.receiving = None
        else:
            # Looked up again: a hostile peer may have ended the command before its data.
            self.receiving = self._in_flight(pdu.cid)  # type: ignore[union-attr]
            if not self._digests.data:
                # With data digests a byte has arrived when the digest of its PDU has been verified.
                _progress(self.receiving, pdu, receiver.payload_left)  # type: ignore[arg-type]
        return ended

    def place(self, pdu: DataPdu) -> memoryview | Sequence[memoryview]:
        """Where data go: into the command's own buffer. Called by the receiver."""
        assert isinstance(pdu, C2HData)
        command = self._in_flight(pdu.cid)
        end = pdu.offset + pdu.data_length
        if end > command.in_bytes:
            raise RemoteProtocolError(
                f"data up to {end} for {command!r}",
                fatal_error_status=FatalErrorStatus.OUT_OF_RANGE,
                information=12,
            )
        command.transferred += pdu.data_length
        if command.transferred > command.in_bytes:
            raise RemoteProtocolError(
                f"more data than {command!r} asked for",
                fatal_error_status=FatalErrorStatus.LIMIT_EXCEEDED,
                information=16,
            )
        place = command.data_in
        if place is None:
            return self._discards(pdu.data_length)
        return place if pdu.data_length == command.in_bytes else place[pdu.offset : end]

    def _in_flight(self, cid: int) -> Command:
        command = self._commands.get(cid)
        if command is None:
            raise RemoteProtocolError(f"there is no command {cid} in flight", information=8)
        return command

    def _discards(self, length: int) -> list[memoryview]:
        if self._discard is None:
            self._discard = memoryview(bytearray(DISCARD_BYTES))
        whole, rest = divmod(length, DISCARD_BYTES)
        return [self._discard] * whole + ([self._discard[:rest]] if rest else [])

    def _apply(self, event: Event, ended: list[Command]) -> None:
        match event:
            case C2HData():
                command = self._in_flight(event.cid)
                _progress(command, event, 0)
                self._end_of_data(command, event, ended)
            case CapsuleResp(cqe):
                self._completion(cqe, ended)
            case R2T():
                self._send_data(event)
            case BadDataDigest(pdu):
                assert isinstance(pdu, C2HData)
                command = self._in_flight(pdu.cid)
                command.spoiled = True
                self._end_of_data(command, pdu, ended)
            case ICResp():
                self._initialized(event)
            case TermReq():
                raise RemoteProtocolError(_why_terminated(event), fatal_error_status=None)
            case _:
                raise MalformedPdu("this PDU is not for a host")

    def _initialized(self, answer: ICResp) -> None:
        if self.state is not QueueState.INITIALIZING:
            raise RemoteProtocolError("ICResp again", fatal_error_status=FatalErrorStatus.SEQUENCE_ERROR)
        got = Digests(answer.header_digest, answer.data_digest)
        for fine, what, field in (
            (answer.version == 0, f"PDU format {answer.version}", 8),
            (self._may_have(got), f"digests {got}, not {self._wanted}", 11),
            (answer.max_h2c_data >= MIN_MAXH2CDATA, f"MAXH2CDATA {answer.max_h2c_data}", 12),
        ):
            if not fine:
                raise RemoteProtocolError(
                    f"the controller answers with {what}",
                    fatal_error_status=FatalErrorStatus.UNSUPPORTED_PARAMETER,
                    information=field,
                )
        self._digests = self._receiver.digests = got
        self._alignment = alignment_bytes(answer.data_alignment)
        self._max_h2c_data = answer.max_h2c_data & ~3
        self._become(QueueState.READY)

    def _may_have(self, got: Digests) -> bool:
        """Whether every digest that is required is among `got`, and none that was not asked for."""
        wanted, required = self._wanted, self._required
        return required.header <= got.header <= wanted.header and required.data <= got.data <= wanted.data

    def _end_of_data(self, command: Command, pdu: C2HData, ended: list[Command]) -> None:
        if pdu.success:
            if not pdu.last:
                raise RemoteProtocolError("SUCCESS on a data PDU that is not the last", information=1)
            self._settle(command, 0, 0, False, ended)

    def _completion(self, cqe: Cqe, ended: list[Command]) -> None:
        command = self._commands.get(cqe.cid)
        if command is None:
            raise RemoteProtocolError(f"command {cqe.cid} is answered, but not in flight", information=20)
        self._settle(command, cqe.status, cqe.result, cqe.do_not_retry, ended)

    def _settle(
        self, command: Command, status: int, result: int, do_not_retry: bool, ended: list[Command]
    ) -> None:
        """The one place where a command of a live queue ends."""
        command.result = result
        self._unexpected -= 1
        del self._commands[command.cid]
        if command.in_bytes > SHORT_PAYLOAD_BYTES:
            self._long_answers -= 1
            self._receiver.awaits_long = self._long_answers > 0
        if command.abandoned:
            self.abandoned -= 1
            command.answered_late = True
            return
        if status == _SUCCESS:
            # A success that does not come with all the data is none: nobody may take the bytes that
            # happened to be in the buffer for an answer.
            if command.spoiled:
                status = Status.TRANSIENT_TRANSPORT_ERROR
            elif (
                command.transferred != command.answer_bytes and not command.may_be_short
            ) or command.requested != command.out_bytes:
                status = Status.DATA_TRANSFER_ERROR
        if command.out_end > self._sent:
            self._detach(command)
        command.end(status, result, do_not_retry=do_not_retry)
        ended.append(command)

    def _send_data(self, r2t: R2T) -> None:
        command = self._in_flight(r2t.cid)
        end = r2t.offset + r2t.length
        if r2t.length == 0 or r2t.offset != command.requested or end > command.out_bytes:
            raise RemoteProtocolError(
                f"R2T of {r2t.offset} to {end} for {command!r}, which has sent {command.requested}",
                fatal_error_status=FatalErrorStatus.OUT_OF_RANGE,
                information=12,
            )
        command.requested = end
        position = r2t.offset
        while position < end:
            size = min(self._max_h2c_data, end - position)
            pdu = H2CData(r2t.cid, r2t.ttag, position, size, position + size == end)
            data = stretch(command.data_out, position, size)
            parts = encode_pdu(pdu, self._digests, self._alignment, data)
            self.output.extend(parts)
            self._queued += sum(map(len, parts))
            position += size
        command.out_end = self._queued


def _progress(command: Command, pdu: C2HData, left: int) -> None:
    """Count the data that are there without a hole; `left` of the PDU have not arrived."""
    if pdu.offset <= command.received:
        arrived = pdu.offset + pdu.data_length - left
        if arrived > command.received:
            command.received = arrived


def stretch(parts: Sequence[Buffer], offset: int, length: int) -> list[memoryview]:
    """`length` bytes of `parts`, from `offset` on, without a copy."""
    found: list[memoryview] = []
    for part in parts:
        size = len(part)
        if offset < size:
            found.append(memoryview(part)[offset : offset + length])
            length -= len(found[-1])
            if not length:
                break
            offset = 0
        else:
            offset -= size
    return found


def _why_terminated(request: TermReq) -> str:
    try:
        status = FatalErrorStatus(request.fatal_error_status).name.lower().replace("_", " ")
    except ValueError:
        status = f"status {request.fatal_error_status}"
    return f"the controller ended the connection: {status}, information {request.information:#x}"
