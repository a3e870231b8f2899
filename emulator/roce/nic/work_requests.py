"""Work requests as `post_send` and `post_recv` take them."""

from dataclasses import dataclass

from emulator.roce.nic.memory import AddressHandle, Bind, MemoryWindow
from emulator.roce.nic.verbs import NO_SEND_FLAGS, SendFlags, SendOpcode, Sge


@dataclass(slots=True)
class SendRequest:
    """struct ibv_send_wr. What an opcode does not use is left at its default.

    With `SendFlags.INLINE` the payload is `inline` where that is given, else it is read from the SGEs'
    regions while `post_send` runs; an atomic write needs no flag for its eight bytes. Atomics: `compare_add`
    is the value compared or added, `swap` the other.
    """

    wr_id: int = 0
    opcode: SendOpcode = SendOpcode.SEND
    flags: SendFlags = NO_SEND_FLAGS
    sges: tuple[Sge, ...] = ()
    imm: int = 0
    invalidate_rkey: int = 0
    remote_address: int = 0
    rkey: int = 0
    compare_add: int = 0
    swap: int = 0
    ah: AddressHandle | None = None
    remote_qpn: int = 0
    remote_qkey: int = 0
    window: MemoryWindow | None = None
    window_rkey: int = 0
    bind: Bind | None = None
    inline: bytes | None = None


@dataclass(slots=True)
class ReceiveRequest:
    """struct ibv_recv_wr."""

    wr_id: int = 0
    sges: tuple[Sge, ...] = ()
