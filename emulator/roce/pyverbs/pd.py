"""`pyverbs.pd`: protection domains. Parent domains are refused: the device has nothing to allocate."""

import errno
import weakref
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NoReturn

from emulator.roce.nic.memory import ProtectionDomain
from emulator.roce.pyverbs import cm_devices
from emulator.roce.pyverbs.base import Children, DeviceObject, PyverbsCM, PyverbsObject, reads
from emulator.roce.pyverbs.device import Context
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from emulator.roce.runtime.device import Device


class DomainUser(PyverbsCM):
    """What a `CMID` is to a `PD` or `MR` made of it: a device, known sooner or later, and a domain there."""

    __slots__ = ("_device", "ctx", "mrs", "pd")

    def __init__(self, pd: "PD | None") -> None:
        self.pd = pd
        self.ctx: Context | None = None
        self.mrs: Children = weakref.WeakSet()
        self._device: Device | None = None

    def opened(self) -> Device:
        """The device. PyverbsUserError before it is known. Not in pyverbs."""
        if self._device is None:
            raise PyverbsUserError("the CMID is not bound to a device yet")
        return self._device

    def default_domain(self) -> ProtectionDomain:
        """The protection domain of all CMIDs of its device. Not in pyverbs."""
        return cm_devices.default_domain(self.opened())

    def domain_holder(self) -> "PD":
        """The PD in which its memory is registered. Not in pyverbs."""
        if self.pd is None:
            self._context_and_domain()
        assert self.pd is not None
        return self.pd

    def _context_and_domain(self) -> None:
        if self.ctx is None:
            Context(cmid=self)
        if self.pd is None:
            PD(self)


class PD(DeviceObject[ProtectionDomain]):
    """A protection domain of a `Context`, or the one that belongs to a CMID's device."""

    __slots__ = ("_borrowed", "ahs", "ctx", "mrs", "mws", "qps", "srqs")
    CHILDREN = "qps ahs mws mrs srqs"
    DESTROY = "dealloc_pd"
    REFUSED = "Failed to dealloc PD"

    ahs: Children
    mrs: Children
    mws: Children
    qps: Children
    srqs: Children

    def __init__(self, creator: Context | DomainUser, **kwargs: Any) -> None:
        if kwargs.get("handle") is not None:
            raise PyverbsRDMAError("Failed to import PD", errno.EOPNOTSUPP)
        self._borrowed = isinstance(creator, DomainUser)
        if isinstance(creator, Context):
            super().__init__(creator.device)
            self.ctx = creator
            self._make("Failed to allocate PD", self.device.nic.alloc_pd)
        elif isinstance(creator, DomainUser):
            if creator.ctx is None:
                raise PyverbsUserError("the CMID is not bound to a device yet")
            super().__init__(creator.opened())
            self.ctx = creator.ctx
            self._native = creator.default_domain()
            creator.pd = self
        else:
            raise PyverbsUserError(f"Cannot create PD from {type(creator)}")
        self.ctx.pds.add(self)

    handle = reads("native.handle", "A number of this domain.")
    pd = reads("native", "In pyverbs the C structure.")

    def advise_mr(self, advise: int, flags: int, sg_list: Sequence[PyverbsCM]) -> NoReturn:
        """Memory is not paged in on demand here, so no advice is taken (EOPNOTSUPP)."""
        raise PyverbsRDMAError("Failed to advise MR", errno.EOPNOTSUPP)

    def unimport(self) -> None:
        """Nothing was imported: close."""
        self.close()

    def _give_back(self, native: ProtectionDomain) -> None:
        if not self._borrowed:
            super()._give_back(native)

    def forget_if_borrowed(self) -> None:
        """The CMID that it belongs to is closed, and with it everything in the domain. Not in pyverbs."""
        if self._borrowed:
            self.close()


@dataclass(slots=True, eq=False)
class ParentDomainContext(PyverbsObject):
    """The caller's own allocator for a parent domain."""

    pd: PD
    alloc_func: InitVar[Callable[..., int]]
    free_func: InitVar[Callable[..., None]]
    user_data: object = None
    p_alloc: Callable[..., int] = field(init=False)
    p_free: Callable[..., None] = field(init=False)

    def __post_init__(self, alloc_func: Callable[..., int], free_func: Callable[..., None]) -> None:
        self.p_alloc, self.p_free = alloc_func, free_func


@dataclass(slots=True, eq=False)
class ParentDomainInitAttr(PyverbsObject):
    pd: PD
    pd_context: ParentDomainContext | None = None
    comp_mask: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.comp_mask = 3 if self.pd_context is not None else 0


class ParentDomain(PD):
    """Refused with EOPNOTSUPP, as by a kernel device that has no driver of its own in user space."""

    __slots__ = ()

    def __init__(self, context: Context, attr: ParentDomainInitAttr) -> None:
        raise PyverbsRDMAError("Failed to allocate Parent Domain", errno.EOPNOTSUPP)
