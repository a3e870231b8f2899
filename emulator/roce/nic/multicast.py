"""Multicast groups of a device: which datagram queue pairs are attached to which (IBTA 10.5; annex A17).

A group is an IP address. Its GID is the address, IPv4 as ::ffff:a.b.c.d, and datagrams for it name queue pair
0xFFFFFF. Each attached queue pair gets a copy of its own, those of the sender's device among them.
"""

import errno
import os
from collections.abc import Callable
from typing import Final

from emulator.roce.nic.queue_pair import QueuePair
from emulator.roce.nic.verbs import Limits, QpType, VerbsError
from emulator.roce.wire.flow import ip_of, is_multicast, packed_address

MULTICAST_QPN: Final = 0xFFFFFF
"""The destination queue pair of every multicast packet (IBTA 9.6.1.2); no queue pair has this number."""


class MulticastGroups:
    """Groups by address. What carries datagrams learns by `on_join` and `on_leave` which of them it has to
    receive: with the first member, and after the last. `on_join` raises OSError where it cannot."""

    def __init__(self, address: str, limits: Limits) -> None:
        self.on_join: Callable[[str], None] = _nothing
        self.on_leave: Callable[[str], None] = _nothing
        self._address_bytes = len(packed_address(address))
        self._limits = limits
        self._members: dict[str, list[QueuePair]] = {}

    def members(self, group: str) -> tuple[QueuePair, ...]:
        """The queue pairs that are attached, in the order in which they were."""
        return tuple(self._members.get(group, ()))

    def groups_of(self, qp: QueuePair) -> list[str]:
        return [group for group, members in self._members.items() if qp in members]

    def attach(self, qp: QueuePair, gid: bytes) -> None:
        """ibv_attach_mcast; once more is no mistake, as in the kernel. EINVAL for what is no group of our
        address family or no datagram queue pair, ENOMEM for a full table, and what `on_join` meets."""
        group = self._group(gid)
        if qp.type is not QpType.UD:
            raise VerbsError(errno.EINVAL, f"a {qp.type.name} queue pair receives no multicast")
        members = self._members.get(group)
        if members is None:
            if len(self._members) >= self._limits.max_mcast_grp:
                raise VerbsError(errno.ENOMEM, f"no more than {self._limits.max_mcast_grp} multicast groups")
            self._join(group)
            self._members[group] = [qp]
        elif qp not in members:
            if len(members) >= self._limits.max_mcast_qp_attach:
                most = self._limits.max_mcast_qp_attach
                raise VerbsError(errno.ENOMEM, f"no more than {most} queue pairs of one multicast group")
            members.append(qp)

    def detach(self, qp: QueuePair, gid: bytes) -> None:
        """ibv_detach_mcast. EINVAL where it is not attached."""
        group = self._group(gid)
        members = self._members.get(group, [])
        if qp not in members:
            raise VerbsError(errno.EINVAL, f"the queue pair is not attached to {group}")
        members.remove(qp)
        if not members:
            self._leave(group)

    def clear(self) -> None:
        """Leave all groups: the end of the device."""
        for group in list(self._members):
            self._leave(group)

    def _group(self, gid: bytes) -> str:
        try:
            group = ip_of(gid)
        except ValueError as error:
            raise VerbsError(errno.EINVAL, str(error)) from None
        if not is_multicast(group) or len(packed_address(group)) != self._address_bytes:
            raise VerbsError(errno.EINVAL, f"{group} is no multicast group for this device")
        return group

    def _join(self, group: str) -> None:
        try:
            self.on_join(group)
        except OSError as error:
            number = error.errno or errno.EIO
            raise VerbsError(number, f"cannot join {group}: {os.strerror(number)}") from error

    def _leave(self, group: str) -> None:
        del self._members[group]
        self.on_leave(group)


def _nothing(group: str) -> None:
    """A device without a network."""
