"""Multicast groups that a CMID joins. Part of `pyverbs.cmid`.

librdmacm attaches the queue pair when the program takes the event; here it is attached before the event is
there, so that what can go wrong is the event's own affair.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from emulator.roce.cm.events import CmEventType
from emulator.roce.cm.service_resolution import ServiceResolution
from emulator.roce.nic.gid import gid_of
from emulator.roce.nic.verbs import VerbsError
from emulator.roce.pyverbs.base import refusal
from emulator.roce.pyverbs.cm_enums import rdma_cm_join_mc_attr_mask, rdma_cm_mc_join_flags
from emulator.roce.pyverbs.cm_options import OptionsOfId
from emulator.roce.pyverbs.cm_records import AddrInfo, JoinMCAttrEx
from emulator.roce.pyverbs.pyverbs_error import PyverbsUserError

if TYPE_CHECKING:
    from emulator.roce.pyverbs.cm_channel import CMEventChannel

_NEEDED = (
    rdma_cm_join_mc_attr_mask.RDMA_CM_JOIN_MC_ATTR_ADDRESS
    | rdma_cm_join_mc_attr_mask.RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS
)


class MulticastOfId(OptionsOfId):
    """The part of a `CMID` that joins groups and leaves them."""

    __slots__ = ("_channel",)

    _channel: CMEventChannel

    if TYPE_CHECKING:

        def _complete(self, refused: str, *wanted: CmEventType) -> None: ...

    def join_multicast(
        self, addr: AddrInfo | None = None, mc_attr: JoinMCAttrEx | None = None, context: int = 0
    ) -> None:
        """Join the group that is the source of `addr`, or of `mc_attr`. MULTICAST_JOIN follows, with where to
        send (`UDParam`), or MULTICAST_ERROR. A queue pair of the CMID's own is attached, unless the join is
        SENDONLY_FULLMEMBER. EINVAL before an address is resolved, and for TCP. `context` is not kept."""
        if addr is None and mc_attr is None:
            raise PyverbsUserError("Join to multicast must have AddrInfo or JoinMCAttrEx arguments")
        refused = "Failed to Join multicast"
        try:
            flags = int(rdma_cm_mc_join_flags.RDMA_MC_JOIN_FLAG_FULLMEMBER)
            if mc_attr is not None:
                addr, flags = mc_attr.addr, _checked_flags(mc_attr)
            group, service = _group_in(addr), self._service()
            receives = flags != rdma_cm_mc_join_flags.RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER
            with self.opened().turn():
                attach = self._attach if receives and self.qp is not None else None
                service.join_multicast(group, None if attach is None else lambda: attach(group))
        except VerbsError as error:
            raise refusal(refused, error) from error
        self._complete(refused, CmEventType.MULTICAST_JOIN)

    def leave_multicast(self, addr: AddrInfo) -> None:
        """Leave the group that is the source of `addr`; what the channel still has of it goes. EADDRNOTAVAIL
        where it was not joined."""
        try:
            group, service = _group_in(addr), self._service()
            with self.opened().turn():
                attached = service.leave_multicast(group)
                if attached and self.qp is not None:
                    self._detach(group)
        except VerbsError as error:
            raise refusal("Failed to leave multicast", error) from error
        self._channel.discard(
            lambda one: one.event is not None and (one.event.connection, one.event.group) == (service, group)
        )

    def _service(self) -> ServiceResolution:
        connection = self.connection()
        if not isinstance(connection, ServiceResolution):
            raise VerbsError(errno.EINVAL, "only RDMA_PS_UDP has multicast groups")
        return connection

    def _attach(self, group: str) -> None:
        assert self.qp is not None
        self.opened().nic.attach_mcast(self.qp.pair, gid_of(group))

    def _detach(self, group: str) -> None:
        assert self.qp is not None
        nic, pair = self.opened().nic, self.qp.pair
        if group in nic.groups.groups_of(pair):
            nic.detach_mcast(pair, gid_of(group))


def _group_in(addr: AddrInfo | None) -> str:
    if addr is None or addr.source is None:
        raise VerbsError(errno.EINVAL, "no group: it is the source of an AddrInfo")
    return addr.source.ip


def _checked_flags(attr: JoinMCAttrEx) -> int:
    """As rdma_join_multicast_ex checks them."""
    if attr.comp_mask & ~_NEEDED:
        raise VerbsError(errno.EOPNOTSUPP, f"mask {attr.comp_mask:#x} has bits that nobody knows")
    if attr.comp_mask != _NEEDED or attr.join_flags not in rdma_cm_mc_join_flags.__members__.values():
        raise VerbsError(errno.EINVAL, f"mask {attr.comp_mask:#x} with flags {attr.join_flags:#x}")
    return attr.join_flags
