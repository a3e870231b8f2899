"""`pyverbs.mr`: memory regions and memory windows.

A region is memory that the program names by its address, or memory that it lets the region allocate. The
latter is an anonymous mapping that lives as long as anything of the device looks at it, so that closing a
region can never leave the device with an address of somebody else's bytes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import TYPE_CHECKING, Any, Final

from emulator.roce.nic.memory import Bind
from emulator.roce.nic.verbs import Access, MwType, VerbsError
from emulator.roce.pyverbs import mem_alloc
from emulator.roce.pyverbs.base import PyverbsCM, forsake, give_back, listing, refusal
from emulator.roce.pyverbs.enums_device import ibv_access_flags, ibv_mw_type, ibv_rereg_mr_flags
from emulator.roce.pyverbs.pd import PD, DomainUser
from emulator.roce.pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError, PyverbsUserError

_WRITES = (
    ibv_access_flags.IBV_ACCESS_LOCAL_WRITE
    | ibv_access_flags.IBV_ACCESS_REMOTE_WRITE
    | ibv_access_flags.IBV_ACCESS_REMOTE_ATOMIC
    | ibv_access_flags.IBV_ACCESS_MW_BIND
)
"""Of these access flags one is enough for a region to want memory that can be written (ib_access_writable).
"""

if TYPE_CHECKING:
    from emulator.roce.nic.memory import MemoryRegion, MemoryWindow
    from emulator.roce.pyverbs.device import DM

HUGE_PAGE_SIZE: Final = 0x200000

_NOT_LOCAL_WRITE: Final = ~int(ibv_access_flags.IBV_ACCESS_LOCAL_WRITE)

_CMID_ACCESS: Final[dict[int, Access]] = {
    ibv_access_flags.IBV_ACCESS_LOCAL_WRITE: Access.LOCAL_WRITE,
    ibv_access_flags.IBV_ACCESS_REMOTE_WRITE: Access.LOCAL_WRITE | Access.REMOTE_WRITE,
    ibv_access_flags.IBV_ACCESS_REMOTE_READ: Access.LOCAL_WRITE | Access.REMOTE_READ,
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


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class MR(PyverbsCM):
    """A memory region of a `PD` or of a CMID's domain.

    `address` registers memory that exists: its owner keeps it alive until the region is closed. Without it
    `length` bytes are allocated. `buf` is the address of byte 0, and what SGEs and the peer name it by.
    """

    __slots__ = ("_access", "_buf", "_memory", "cmid", "device", "pd", "region")

    def __init__(
        self,
        creator: PD | DomainUser,
        length: int = 0,
        access: int = 0,
        address: int | None = None,
        implicit: bool = False,
        **kwargs: Any,
    ) -> None:
        self.region: MemoryRegion | None = None
        self.pd: PD | None = None
        self.cmid: DomainUser | None = None
        self._memory: memoryview | None = None
        if kwargs.get("handle") is not None:
            raise PyverbsRDMAError("Failed to import MR", errno.EOPNOTSUPP)
        if implicit or access & ibv_access_flags.IBV_ACCESS_ON_DEMAND:
            raise PyverbsRDMAError("Failed to register a MR on demand", errno.EOPNOTSUPP)
        if isinstance(creator, PD):
            pd, wanted = creator, access & ~ibv_access_flags.IBV_ACCESS_HUGETLB
        elif isinstance(creator, DomainUser):
            pd, wanted = creator.domain_holder(), _CMID_ACCESS.get(access, -1)
            self.cmid = creator
        else:
            raise PyverbsUserError(f"Cannot create MR from {type(creator)}")
        self.device = pd.device
        self._access = wanted
        refused = f"Failed to register a MR. length: {length}, access flags: {access}"
        if wanted < 0 or length <= 0:
            # The kernel registers no region without a page (ib_umem_get).
            raise PyverbsRDMAError(refused, errno.EINVAL)
        if address:
            if not is_memory(address, length, wanted):
                raise PyverbsRDMAError(refused, errno.EFAULT)
            self._memory, self._buf = mem_alloc.view(address, length), address
        else:
            self._memory = _allocated(length, bool(access & ibv_access_flags.IBV_ACCESS_HUGETLB))
            self._buf = _address_of(self._memory)
        self.region = self._registered(pd, self._memory, self._buf, wanted, refused)
        self.pd = pd
        pd.mrs.add(self)
        if self.cmid is not None:
            self.cmid.mrs.add(self)

    @staticmethod
    def _registered(pd: PD, memory: memoryview, address: int, access: int, refused: str) -> MemoryRegion:
        try:
            with pd.device.turn():
                return pd.device.nic.reg_mr(pd.domain, memory, address, Access(access))
        except VerbsError as error:
            raise refusal(refused, error) from error

    def __del__(self) -> None:
        if getattr(self, "region", None) is not None:
            forsake(self)

    def close(self) -> None:
        """Deregister. Memory that was allocated here goes when nobody looks at it any more."""
        if self.region is None:
            return
        give_back(self.device, self.device.nic.dereg_mr, self.region, "Failed to dereg MR")
        self.region = self._memory = self.pd = self.cmid = None
        self._buf = 0

    def unimport(self) -> None:
        """Nothing was imported; to close is all there is to do."""
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
        """`length` bytes of the region from `offset` on."""
        return bytes(self._part(length, offset))

    def rereg(
        self, flags: int, pd: PD | None = None, addr: int = 0, length: int = 0, access: int = 0
    ) -> None:
        """Change the domain, the memory or the access, as `flags` says (ibv_rereg_mr). The keys stay."""
        if self.region is None or self.pd is None or self._memory is None:
            raise PyverbsUserError("the MR is closed")
        memory, buf, wanted, owner = self._memory, self._buf, self._access, self.pd
        if flags & ~7 or not flags:
            raise PyverbsRDMAError("Failed to rereg MR", errno.EINVAL)
        if flags & ibv_rereg_mr_flags.IBV_REREG_MR_CHANGE_TRANSLATION:
            if not addr or length <= 0:
                raise PyverbsRDMAError("Failed to rereg MR: IBV_REREG_MR_ERR_INPUT", errno.EINVAL)
            memory, buf = mem_alloc.view(addr, length), addr
        if flags & ibv_rereg_mr_flags.IBV_REREG_MR_CHANGE_PD and pd is not None:
            owner = pd
        if flags & ibv_rereg_mr_flags.IBV_REREG_MR_CHANGE_ACCESS:
            wanted = access
        try:
            with self.device.turn():
                region = self.device.nic.rereg_mr(self.region, owner.domain, memory, buf, Access(wanted))
        except VerbsError as error:
            raise refusal("Failed to rereg MR: IBV_REREG_MR_ERR_CMD", error) from error
        self.pd.mrs.discard(self)
        owner.mrs.add(self)
        self.region, self._memory, self._buf, self._access, self.pd = region, memory, buf, wanted, owner

    def registered(self) -> MemoryRegion:
        """The device's own. PyverbsUserError when closed. Not in pyverbs."""
        if self.region is None:
            raise PyverbsUserError("the MR is closed")
        return self.region

    @property
    def buf(self) -> int:
        """The address of byte 0; 0 when closed."""
        return self._buf

    @property
    def lkey(self) -> int:
        """The key for SGEs."""
        return self.registered().lkey

    @property
    def rkey(self) -> int:
        """The key for the peer."""
        return self.registered().rkey

    @property
    def length(self) -> int:
        """Bytes."""
        return self.registered().length

    @property
    def handle(self) -> int:
        """A number of this region."""
        return self.registered().lkey >> 8

    def __str__(self) -> str:
        return "MR:\n" + listing(
            [
                ("lkey", self.lkey), ("rkey", self.rkey), ("length", self.length), ("buf", self.buf),
                ("handle", self.handle),
            ]
        )  # fmt: skip


class MWBindInfo(PyverbsCM):
    """struct ibv_mw_bind_info: the bytes that a window opens, and for what."""

    __slots__ = ("addr", "length", "mr", "mw_access_flags")

    def __init__(self, mr: MR, addr: int, length: int, mw_access_flags: int) -> None:
        self.mr = mr
        self.addr = addr
        self.length = length
        self.mw_access_flags = mw_access_flags

    def bind(self) -> Bind:
        """What the device takes. Not in pyverbs."""
        # That a window may be written locally says nothing: no local key is its own.
        access = int(self.mw_access_flags) & _NOT_LOCAL_WRITE
        return Bind(self.mr.registered(), self.addr, self.length, Access(access))

    def __str__(self) -> str:
        return "MWBindInfo:\n" + listing(
            [("Addr", self.addr), ("Length", self.length), ("MW access flags", int(self.mw_access_flags))]
        )


class MWBind(PyverbsCM):
    """struct ibv_mw_bind: the request by which `QP.bind_mw` binds a window of type 1."""

    __slots__ = ("info", "send_flags", "wr_id")

    def __init__(self, info: MWBindInfo, send_flags: int, wr_id: int = 0) -> None:
        self.info = info
        self.send_flags = send_flags
        self.wr_id = wr_id

    def __str__(self) -> str:
        return "MWBind:\n" + listing([("WR id", self.wr_id), ("Send flags", int(self.send_flags))])


class MW(PyverbsCM):
    """A memory window.

    `rkey` is the key as allocated, or as `QP.bind_mw` has set it; a bind that was posted as a work request
    carries its own, as with libibverbs.
    """

    __slots__ = ("device", "pd", "rkey", "window")

    def __init__(self, pd: PD, mw_type: int) -> None:
        self.window: MemoryWindow | None = None
        device = self.device = pd.device
        try:
            kind = MwType(mw_type)
        except ValueError as error:
            raise PyverbsRDMAError("Failed to allocate MW", errno.EINVAL) from error
        try:
            with device.turn():
                self.window = device.nic.alloc_mw(pd.domain, kind)
        except VerbsError as error:
            raise refusal("Failed to allocate MW", error) from error
        self.rkey = self.window.rkey
        self.pd: PD | None = pd
        pd.mws.add(self)

    def __del__(self) -> None:
        if getattr(self, "window", None) is not None:
            forsake(self)

    def close(self) -> None:
        """Free the window; the peer reaches nothing by it any more."""
        if self.window is None:
            return
        give_back(self.device, self.device.nic.dealloc_mw, self.window, "Failed to dealloc MW")
        self.window = self.pd = None

    @property
    def handle(self) -> int:
        """A number of this window."""
        return self.rkey >> 8

    @property
    def type(self) -> int:
        """An `ibv_mw_type`."""
        if self.window is None:
            raise PyverbsUserError("the MW is closed")
        return int(self.window.type)

    def __str__(self) -> str:
        return "MW:\n" + listing(
            [("Rkey", self.rkey), ("Handle", self.handle), ("MW Type", mwtype2str(self.type))]
        )


class DMMR(MR):
    """Memory on the device: there is none (EOPNOTSUPP)."""

    __slots__ = ()

    def __init__(self, pd: PD, length: int, access: int, dm: DM, offset: int) -> None:
        self.region = None
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
        self.region = None
        raise PyverbsRDMAError(f"Failed to register a dma-buf MR. length: {length}", errno.EOPNOTSUPP)

    @property
    def dmabuf(self) -> None:
        """There is none."""

    @property
    def offset(self) -> int:
        """There is none."""
        return 0


def mwtype2str(mw_type: int) -> str:
    """The name of an `ibv_mw_type`."""
    try:
        return ibv_mw_type(mw_type).name
    except ValueError:
        return f"Unknown MW type ({mw_type})"


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
