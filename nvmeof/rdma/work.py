"""Work requests and completions as the protocol objects of NVMe/RDMA speak them.

A queue puts `Work` into its send queue and `Receive` into its receive queue, in order. The transport maps
them to verbs and posts them. It gives back a `Done` for each receive and for each work request that is
`signaled` or fails.

A work request's id tells its kind, because a completion with an error tells nothing else:
`kind << 32 | number`.
Access flags have the values of ibv_access_flags.
"""

from enum import IntEnum, IntFlag
from typing import Any, Final, NamedTuple, Protocol, TypeAlias


class Access(IntFlag):
    """What a registration allows, besides being read by our own side."""

    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    WINDOW_BIND = 16


class WorkKind(IntEnum):
    """The high half of a work request's id."""

    RECEIVE = 1
    SEND = 2
    READ = 3
    WRITE = 4
    BIND = 5
    INVALIDATE = 6


def work_id(kind: WorkKind, number: int = 0) -> int:
    """The id of a work request; `number` has 32 bits and a meaning by kind."""
    return kind << 32 | number


class Span(NamedTuple):
    """A stretch of our own registered memory."""

    address: int
    length: int
    lkey: int


class Send(NamedTuple):
    """A message; with `invalidate` the peer's R_Key that is invalidated as it arrives."""

    work_id: int
    span: Span
    signaled: bool
    invalidate: int | None = None


class Write(NamedTuple):
    """RDMA WRITE of `span` to the peer's memory."""

    work_id: int
    span: Span
    remote_address: int
    rkey: int
    signaled: bool = False


class Read(NamedTuple):
    """RDMA READ of the peer's memory into `span`."""

    work_id: int
    span: Span
    remote_address: int
    rkey: int
    signaled: bool = True


class BindWindow(NamedTuple):
    """Open a type 2 memory window over `span` for the peer, under a new R_Key.

    `window` is its number among those that the queue was given. `span.lkey` names the registration.
    """

    work_id: int
    window: int
    rkey: int
    span: Span
    access: Access
    signaled: bool = False


class Invalidate(NamedTuple):
    """Close one of our own windows."""

    work_id: int
    rkey: int
    signaled: bool = True


Work: TypeAlias = Send | Write | Read | BindWindow | Invalidate


class Receive(NamedTuple):
    """A place for one message of the peer."""

    work_id: int
    span: Span


class Done(NamedTuple):
    """A completion. `status` is ibv_wc_status, 0 for success; the rest has a meaning only then."""

    work_id: int
    status: int = 0
    length: int = 0
    invalidated: int | None = None
    """The R_Key of ours that the peer's SEND invalidated."""


FLUSHED: Final = 5
"""IBV_WC_WR_FLUSH_ERR: the queue pair was in error already, so this completion is not the reason."""

STATUS_WORDS: Final = {
    1: "local length error",
    2: "local queue pair operation error",
    4: "local protection error",
    FLUSHED: "flushed",
    6: "memory window bind error",
    7: "bad response",
    8: "local access error",
    9: "remote invalid request",
    10: "remote access error",
    11: "remote operation error",
    12: "transport retries exceeded",
    13: "receiver not ready retries exceeded",
    16: "remote abort",
    19: "fatal error",
    20: "response timeout",
    21: "general error",
}


def describe_status(status: int) -> str:
    return STATUS_WORDS.get(status, f"completion status {status}")


class Region(NamedTuple):
    """A registration. `view` keeps the memory alive; `handle` is the transport's."""

    view: memoryview
    address: int
    lkey: int
    rkey: int
    handle: Any


class Registrar(Protocol):
    """Where memory is registered; the transport's protection domain."""

    def register(self, view: memoryview, access: Access) -> Region:
        """Register writable, contiguous memory. Raises `ConnectionLost` when the device will not."""

    def deregister(self, region: Region) -> None:
        """Take it back; nobody may use it any more."""
