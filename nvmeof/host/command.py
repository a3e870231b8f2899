"""One command of the host role, from submission to its single end. `commands.py` builds them.

A command is submitted to one queue, once. It ends exactly once, in one of three ways: the controller's
completion, the death of the queue (`lost`), or, for one that was abandoned, without anybody being told.
"""

from collections.abc import Sequence
from typing import Final

from nvmeof.errors import CommandFailed, ConnectionLost
from nvmeof.tcp.crc32c import Buffer
from nvmeof.wire.sqe import AdminOpcode
from nvmeof.wire.status import describe

CID_COUNT: Final = 0xFFFF
"""Ids are dealt in turn from 0 to FFFEh, so that an id comes again as late as it can. FFFFh has a meaning
of its own (the error log: no particular command)."""


class Command:
    """Fields of the submission entry, the memory for its data, and what became of it."""

    def __init__(
        self,
        name: str,
        opcode: int,
        nsid: int = 0,
        cdw10: int = 0,
        cdw11: int = 0,
        cdw12: int = 0,
        cdw13: int = 0,
        cdw14: int = 0,
        cdw15: int = 0,
        *,
        data_in: memoryview | None = None,
        data_out: Sequence[Buffer] = (),
        in_capsule: bool = False,
    ) -> None:
        self.name = name
        """For log lines: "read", "identify"."""
        self.opcode = opcode
        self.nsid = nsid
        self.cdw2 = 0
        self.cdw3 = 0
        self.cdw10 = cdw10
        self.cdw11 = cdw11
        self.cdw12 = cdw12
        self.cdw13 = cdw13
        self.cdw14 = cdw14
        self.cdw15 = cdw15
        self.data_in = data_in
        """Where the controller's data go: writable, bytes, exactly as long as the answer."""
        self.in_bytes = len(data_in) if data_in is not None else 0
        self.data_out = data_out
        """What the controller gets: buffers of bytes, sent in turn and never joined."""
        self.out_bytes = sum(map(len, data_out)) if data_out else 0
        self.result_is_length = False
        """`result` will be the length of the whole value; the answer is as much of it as fits."""
        self.may_be_short = False
        """The controller may send less than `data_in` takes; the answer tells by itself where it ends."""
        self.in_capsule = in_capsule
        """The data must travel in the capsule, whatever their size (Connect)."""

        self.done = False
        self.status: int | None = None
        """SCT << 8 | SC; None while in flight and when lost."""
        self.do_not_retry = False
        self.result = 0
        self.received = 0
        """Bytes of `data_in` that have arrived, from its beginning and without a hole; may lag."""
        self.lost = False
        """It ended because the queue died."""
        self.why_lost = ""
        self.cid = -1
        """Its id on the queue; -1 before it is submitted."""
        self.heard = 0
        """How much the owner of its queue had heard when it was submitted."""
        self.submitted_at = 0.0
        self.abandoned = False
        self.answered_late = False
        """It was abandoned, and the controller has answered it since: nothing of it is to come."""
        self.orphaned = False
        """It was abandoned, and its queue has ended since: it is never answered, and may still be carried out
        for as long as the controller takes to find out."""

        # The transport's bookkeeping.
        self.transferred = 0
        """Bytes of `data_in` for which data PDUs have begun, in any order."""
        self.requested = 0
        """Bytes of `data_out` that the controller has asked for."""
        self.out_end = 0
        """Where its data end in the stream that the queue sends."""
        self.spoiled = False
        """Some of its data failed the digest."""

    def __repr__(self) -> str:
        if not self.done:
            state = "new" if self.cid < 0 else "in flight"
        else:
            state = self.failure() or "done"
        return f"<Command {self.name} nsid={self.nsid} cid={self.cid}: {state}>"

    def failure(self) -> str | None:
        """Why it failed, in a few words; None while in flight and after success."""
        if self.lost:
            return self.why_lost or "connection lost"
        if self.status:
            return describe(self.status, fabrics=self.opcode == AdminOpcode.FABRICS)
        return None

    def check(self) -> None:
        """Raise if it failed: `ConnectionLost`, or `CommandFailed` with its status."""
        if self.lost:
            raise ConnectionLost(f"{self.name}: {self.failure()}")
        if self.status:
            raise CommandFailed(self.status, f"{self.name}: {self.failure()}")

    @property
    def answer_bytes(self) -> int:
        """Bytes of `data_in` that the answer, which came well, has filled."""
        return min(self.result, self.in_bytes) if self.result_is_length else self.in_bytes

    def end(self, status: int, result: int = 0, *, do_not_retry: bool = False) -> None:
        """The controller's answer, as the queue settles it. A second end is a bug."""
        assert not self.done, f"{self!r} ends twice"
        self.status = status
        self.result = result
        self.do_not_retry = do_not_retry
        self.done = True

    def lose(self, reason: str) -> None:
        """The queue died with this command in flight."""
        assert not self.done, f"{self!r} ends twice"
        self.lost = True
        self.why_lost = reason
        self.done = True
