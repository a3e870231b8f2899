"""`pyverbs.pd`: protection domains. Parent domains are refused: the device has nothing to allocate."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from emulator.roce.nic.verbs import VerbsError
from emulator.roce.pyverbs import cm_devices
from emulator.roce.pyverbs.base import (
    Children,
    PyverbsCM,
    PyverbsObject,
    bury,
    close_children,
    forsake,
    give_back,
    refusal,
)
from emulator.roce.pyverbs.device import Context
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError

if TYPE_CHECKING:
    from emulator.roce.nic.memory import ProtectionDomain
    from emulator.roce.runtime.device import Device


class DomainUser(PyverbsCM):
    """What a `CMID` is to a `PD` or `MR` made of it: a device, known sooner or later, and a domain there."""

    __slots__ = ("_device", "ctx", "mrs", "pd")

    def __init__(self, pd: PD | None) -> None:
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

    def domain_holder(self) -> PD:
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


class PD(PyverbsCM):
    """A protection domain of a `Context`, or the one that belongs to a CMID's device."""

    __slots__ = ("_borrowed", "_domain", "ahs", "ctx", "device", "mrs", "mws", "qps", "srqs")

    def __init__(self, creator: Context | DomainUser, **kwargs: Any) -> None:
        self._domain: ProtectionDomain | None = None
        self._borrowed = isinstance(creator, DomainUser)
        self.srqs: Children = weakref.WeakSet()
        self.mrs: Children = weakref.WeakSet()
        self.mws: Children = weakref.WeakSet()
        self.ahs: Children = weakref.WeakSet()
        self.qps: Children = weakref.WeakSet()
        if kwargs.get("handle") is not None:
            raise PyverbsRDMAError("Failed to import PD", errno.EOPNOTSUPP)
        if isinstance(creator, Context):
            bury()
            self.ctx, self.device = creator, creator.device
            try:
                with self.device.turn():
                    self._domain = self.device.nic.alloc_pd()
            except VerbsError as error:
                raise refusal("Failed to allocate PD", error) from error
        elif isinstance(creator, DomainUser):
            if creator.ctx is None:
                raise PyverbsUserError("the CMID is not bound to a device yet")
            self.ctx, self.device = creator.ctx, creator.opened()
            self._domain = creator.default_domain()
            creator.pd = self
        else:
            raise PyverbsUserError(f"Cannot create PD from {type(creator)}")
        self.ctx.pds.add(self)

    def __del__(self) -> None:
        if getattr(self, "_domain", None) is not None:
            forsake(self)

    @property
    def domain(self) -> ProtectionDomain:
        """What the device knows it by. Not in pyverbs."""
        if self._domain is None:
            raise PyverbsUserError("the PD is closed")
        return self._domain

    @property
    def handle(self) -> int:
        """A number of this domain."""
        return self.domain.handle

    @property
    def pd(self) -> ProtectionDomain:
        """As `domain`: in pyverbs the C structure."""
        return self.domain

    def advise_mr(self, advise: int, flags: int, sg_list: Sequence[PyverbsCM]) -> NoReturn:
        """Memory is not paged in on demand here, so no advice is taken (EOPNOTSUPP)."""
        raise PyverbsRDMAError("Failed to advise MR", errno.EOPNOTSUPP)

    def unimport(self) -> None:
        """Nothing was imported; to close is all there is to do."""
        self.close()

    def close(self) -> None:
        """Close everything in the domain, and the domain."""
        if self._domain is None:
            return
        close_children(self.qps, self.ahs, self.mws, self.mrs, self.srqs)
        if not self._borrowed:
            give_back(self.device, self.device.nic.dealloc_pd, self._domain, "Failed to dealloc PD")
        self._domain = None

    def forget_if_borrowed(self) -> None:
        """The CMID that it belongs to is closed, and with it everything in the domain. Not in pyverbs."""
        if self._borrowed:
            self.close()


class ParentDomainContext(PyverbsObject):
    """The caller's own allocator for a parent domain."""

    __slots__ = ("p_alloc", "p_free", "pd", "user_data")

    def __init__(
        self, pd: PD, alloc_func: Callable[..., int], free_func: Callable[..., None], user_data: object = None
    ) -> None:
        self.pd = pd
        self.p_alloc = alloc_func
        self.p_free = free_func
        self.user_data = user_data


class ParentDomainInitAttr(PyverbsObject):
    """struct ibv_parent_domain_init_attr."""

    __slots__ = ("comp_mask", "pd", "pd_context")

    def __init__(self, pd: PD, pd_context: ParentDomainContext | None = None) -> None:
        self.pd = pd
        self.pd_context = pd_context
        self.comp_mask = 3 if pd_context is not None else 0


class ParentDomain(PD):
    """Refused with EOPNOTSUPP, as by a kernel device that has no driver of its own in user space."""

    __slots__ = ()

    def __init__(self, context: Context, attr: ParentDomainInitAttr) -> None:
        self._domain = None
        raise PyverbsRDMAError("Failed to allocate Parent Domain", errno.EOPNOTSUPP)
