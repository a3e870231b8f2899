"""`pyverbs.mr`: memory regions and memory windows.

A region is memory that the program names by its address, or memory that it lets the region allocate. The
latter is an anonymous mapping that lives as long as the device refers to it, so a closed region never leaves
the device with a foreign address.
"""

import errno
import mmap
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from emulator.roce.link.messages import address_of
from emulator.roce.nic.memory import Bind, MemoryRegion, MemoryWindow
from emulator.roce.nic.verbs import Access, MwType
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs import mem_alloc
from emulator.roce.pyverbs.base import DeviceObject, PyverbsCM, asking, reads, shown
from emulator.roce.pyverbs.device import DM
from emulator.roce.pyverbs.pd import PD, DomainUser
from emulator.roce.pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError, PyverbsUserError

_WRITES = (
    e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_ATOMIC | e.IBV_ACCESS_MW_BIND
)
"""Of these access flags one is enough for a region to want memory that can be written (ib_access_writable).
"""

HUGE_PAGE_SIZE: Final = 0x200000

_NOT_LOCAL_WRITE: Final = ~int(e.IBV_ACCESS_LOCAL_WRITE)

_CMID_ACCESS: Final[dict[int, Access]] = {
    e.IBV_ACCESS_LOCAL_WRITE: Access.LOCAL_WRITE,
    e.IBV_ACCESS_REMOTE_WRITE: Access.LOCAL_WRITE | Access.REMOTE_WRITE,
    e.IBV_ACCESS_REMOTE_READ: Access.LOCAL_WRITE | Access.REMOTE_READ,
}
"""What rdma_reg_msgs, rdma_reg_write and rdma_reg_read ask for."""


def _allocated(length: int, huge: bool) -> memoryview:
    """Zeroed memory of its own, whole pages. PyverbsError where there is none."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    size = length
    if huge:
        flags |= mem_alloc.MAP_HUGETLB_
        size = -(-length // HUGE_PAGE_SIZE) * HUGE_PAGE_SIZE
    try:
        return memoryview(mmap.mmap(-1, size, flags=flags))[:length]
    except (OSError, ValueError, OverflowError) as error:
        raise PyverbsError(f"Failed to allocate MR buffer of size {length}: {error}") from error


class MR(DeviceObject[MemoryRegion]):
    """A memory region of a `PD` or of a CMID's domain.

    `address` registers memory that exists: its owner keeps it alive until the region is closed. Without it
    `length` bytes are allocated, which live as long as the device refers to them. `buf` is the address of
    byte 0, and what SGEs and the peer name it by.
    """

    __slots__ = ("_access", "_buf", "_memory", "cmid", "pd")
    PARENTS = "_memory pd cmid"
    DESTROY = "dereg_mr"
    REFUSED = "Failed to dereg MR"

    def __init__(
        self,
        creator: PD | DomainUser,
        length: int = 0,
        access: int = 0,
        address: int | None = None,
        implicit: bool = False,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("handle") is not None:
            raise PyverbsRDMAError("Failed to import MR", errno.EOPNOTSUPP)
        if implicit or access & e.IBV_ACCESS_ON_DEMAND:
            raise PyverbsRDMAError("Failed to register a MR on demand", errno.EOPNOTSUPP)
        if isinstance(creator, PD):
            pd, wanted = creator, access & ~e.IBV_ACCESS_HUGETLB
        elif isinstance(creator, DomainUser):
            pd, wanted = creator.domain_holder(), _CMID_ACCESS.get(access, -1)
        else:
            raise PyverbsUserError(f"Cannot create MR from {type(creator)}")
        super().__init__(pd.device)
        self._access = wanted
        refused = f"Failed to register a MR. length: {length}, access flags: {access}"
        if wanted < 0 or length <= 0:
            # The kernel registers no region without a page (ib_umem_get).
            raise PyverbsRDMAError(refused, errno.EINVAL)
        if address:
            if not is_memory(address, length, wanted):
                raise PyverbsRDMAError(refused, errno.EFAULT)
            memory, buf = mem_alloc.view(address, length), address
        else:
            memory = _allocated(length, bool(access & e.IBV_ACCESS_HUGETLB))
            buf = address_of(memory)
        nic = self.device.nic
        self._make(refused, lambda: nic.reg_mr(pd.native, memory, buf, Access(wanted)))
        self._memory: memoryview | None = memory
        self._buf = buf
        self.pd: PD | None = pd
        pd.mrs.add(self)
        self.cmid = creator if isinstance(creator, DomainUser) else None
        if self.cmid is not None:
            self.cmid.mrs.add(self)

    def unimport(self) -> None:
        """Nothing was imported: close."""
        self.close()

    def _part(self, length: int, offset: int) -> memoryview:
        if self._memory is None or length < 0:
            raise PyverbsUserError(f"The MR buffer isn't allocated or length {length} is invalid")
        if offset < 0 or offset + length > len(self._memory):
            raise PyverbsUserError(f"Invalid offset {offset}: {length} bytes there are not in the MR")
        return self._memory[offset : offset + length]

    def write(self, data: str | bytes, length: int, offset: int = 0) -> None:
        """Copy `length` bytes of `data` into the region; text is encoded first."""
        source = data.encode() if isinstance(data, str) else data
        taken = memoryview(source)[:length]
        self._part(len(taken), offset)[:] = taken

    def read(self, length: int, offset: int) -> bytes:
        return bytes(self._part(length, offset))

    def rereg(
        self, flags: int, pd: PD | None = None, addr: int = 0, length: int = 0, access: int = 0
    ) -> None:
        """Change the domain, the memory or the access, as `flags` says (ibv_rereg_mr). The keys stay."""
        if self._native is None or self.pd is None or self._memory is None:
            raise PyverbsUserError("the MR is closed")
        memory, buf, wanted, owner = self._memory, self._buf, self._access, self.pd
        if flags & ~7 or not flags:
            raise PyverbsRDMAError("Failed to rereg MR", errno.EINVAL)
        if flags & e.IBV_REREG_MR_CHANGE_TRANSLATION:
            if not addr or length <= 0:
                raise PyverbsRDMAError("Failed to rereg MR: IBV_REREG_MR_ERR_INPUT", errno.EINVAL)
            memory, buf = mem_alloc.view(addr, length), addr
        if flags & e.IBV_REREG_MR_CHANGE_PD and pd is not None:
            owner = pd
        if flags & e.IBV_REREG_MR_CHANGE_ACCESS:
            wanted = access
        nic = self.device.nic
        with asking(self.device, "Failed to rereg MR: IBV_REREG_MR_ERR_CMD"):
            region = nic.rereg_mr(self._native, owner.native, memory, buf, Access(wanted))
        self.pd.mrs.discard(self)
        owner.mrs.add(self)
        self._native, self._memory, self._buf, self._access, self.pd = region, memory, buf, wanted, owner

    @property
    def buf(self) -> int:
        """The address of byte 0; 0 when closed."""
        return self._buf if self._native is not None else 0

    lkey = reads("native.lkey", "The key for SGEs.")
    rkey = reads("native.rkey", "The key for the peer.")
    length = reads("native.length", "Bytes.")

    @property
    def handle(self) -> int:
        return self.native.lkey >> 8

    __str__ = shown(
        "MR:\n",
        ("lkey", "lkey"), ("rkey", "rkey"), ("length", "length"), ("buf", "buf"), ("handle", "handle"),
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class MWBindInfo(PyverbsCM):
    """struct ibv_mw_bind_info: the bytes that a window opens, and for what."""

    mr: MR
    addr: int
    length: int
    mw_access_flags: int

    def bind(self) -> Bind:
        """What the device takes. Not in pyverbs."""
        # That a window may be written locally says nothing: no local key is its own.
        access = int(self.mw_access_flags) & _NOT_LOCAL_WRITE
        return Bind(self.mr.native, self.addr, self.length, Access(access))

    __str__ = shown(
        "MWBindInfo:\n",
        ("Addr", "addr"), ("Length", "length"), ("MW access flags", "mw_access_flags", int),
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class MWBind(PyverbsCM):
    """struct ibv_mw_bind: the request by which `QP.bind_mw` binds a window of type 1."""

    info: MWBindInfo
    send_flags: int
    wr_id: int = 0

    __str__ = shown("MWBind:\n", ("WR id", "wr_id"), ("Send flags", "send_flags", int))


def mwtype2str(mw_type: int) -> str:
    try:
        return e.ibv_mw_type(mw_type).name
    except ValueError:
        return f"Unknown MW type ({mw_type})"


class MW(DeviceObject[MemoryWindow]):
    """A memory window.

    `rkey` is the key as allocated, or as `QP.bind_mw` has set it; a bind that was posted as a work request
    carries its own, as with libibverbs.
    """

    __slots__ = ("pd", "rkey")
    PARENTS = "pd"
    DESTROY = "dealloc_mw"
    REFUSED = "Failed to dealloc MW"

    def __init__(self, pd: PD, mw_type: int) -> None:
        refused = "Failed to allocate MW"
        try:
            kind = MwType(mw_type)
        except ValueError as error:
            raise PyverbsRDMAError(refused, errno.EINVAL) from error
        super().__init__(pd.device)
        self.rkey = self._make(refused, lambda: self.device.nic.alloc_mw(pd.native, kind)).rkey
        self.pd: PD | None = pd
        pd.mws.add(self)

    @property
    def handle(self) -> int:
        return self.rkey >> 8

    @property
    def type(self) -> int:
        """An `ibv_mw_type`."""
        return int(self.native.type)

    __str__ = shown("MW:\n", ("Rkey", "rkey"), ("Handle", "handle"), ("MW Type", "type", mwtype2str))


class DMMR(MR):
    """Memory on the device: there is none (EOPNOTSUPP)."""

    __slots__ = ()

    def __init__(self, pd: PD, length: int, access: int, dm: DM, offset: int) -> None:
        raise PyverbsRDMAError(f"Failed to register a device MR. length: {length}", errno.EOPNOTSUPP)


class DmaBufMR(MR):
    """A dma-buf of another device: the emulated one has no way to it (EOPNOTSUPP)."""

    __slots__ = ()

    def __init__(
        self,
        pd: PD,
        length: int,
        access: int,
        dmabuf: object = None,
        offset: int = 0,
        gpu: int = 0,
        gtt: int = 0,
    ) -> None:
        raise PyverbsRDMAError(f"Failed to register a dma-buf MR. length: {length}", errno.EOPNOTSUPP)

    dmabuf: ClassVar[None] = None
    offset: ClassVar[int] = 0
    """There is none."""


def is_memory(address: int, length: int, access: int) -> bool:
    """Whether all of it is mapped, to be read, and to be written where `access` lets anybody write."""
    at, end = address, address + length
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, allowed, _ = line.split(maxsplit=2)
            begin, behind = (int(word, 16) for word in span.split("-"))
            if behind <= at:
                continue
            if begin > at or allowed[0] != "r" or (access & _WRITES and allowed[1] != "w"):
                return False
            at = behind
            if at >= end:
                return True
    return False
