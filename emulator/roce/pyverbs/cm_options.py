"""Options of a CMID, and what rdma_cm has that is not here. Part of `pyverbs.cmid`."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from emulator.roce.pyverbs.cm_enums import RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, rdma_port_space
from emulator.roce.pyverbs.cm_queue_pair import QueuePairOfId
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.qp import ECE
from emulator.roce.wire.cm_ip import PortSpace

if TYPE_CHECKING:
    from emulator.roce.cm.connection import Connection


class OptionsOfId(QueuePairOfId):
    """The part of a `CMID` that is said and hardly ever changes anything."""

    __slots__ = ("_ack_timeout", "_connection", "_port_space")

    _ack_timeout: int | None
    _connection: Connection | None
    _port_space: PortSpace

    def _take_port_space(self, port_space: int) -> None:
        if port_space not in (rdma_port_space.RDMA_PS_TCP, rdma_port_space.RDMA_PS_UDP):
            raise PyverbsRDMAError("Failed to create CM ID", errno.EOPNOTSUPP)
        self._port_space = PortSpace(port_space)

    @property
    def datagrams(self) -> bool:
        """Whether its port space is RDMA_PS_UDP. Not in pyverbs."""
        return self._port_space is PortSpace.UDP

    def set_option(self, level: int, optname: int, optval: int, optlen: int) -> None:
        """RDMA_OPTION_ID_ACK_TIMEOUT: the exponent of the local ACK time-out, up to 31."""
        if optname != RDMA_OPTION_ID_ACK_TIMEOUT:
            raise PyverbsUserError("Currently only RDMA_OPTION_ID_ACK_TIMEOUT is supported in Pyverbs.")
        if level != RDMA_OPTION_ID or optlen != 1 or not 0 <= optval <= 31:
            raise PyverbsRDMAError("Failed to set option", errno.EINVAL)
        self._ack_timeout = optval
        if self._connection is not None:
            with self.opened().turn():
                self._connection.ack_exponent = optval

    def set_local_ece(self, ece: ECE) -> None:
        """There are no extensions to agree on, so nothing is said of them."""

    def get_remote_ece(self) -> ECE:
        """No peer is heard of extensions."""
        return ECE()
