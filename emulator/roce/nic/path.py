"""Where packets go and come from: addresses as the ICRC wants them, prepared once."""

from __future__ import annotations

from functools import lru_cache

from emulator.roce.nic.verbs import ROCE_PORT, Address
from emulator.roce.wire.flow import Flow, flow_of


class Path:
    """The way to one address. `numbered` says that segment i of a burst travels with IP identification i."""

    __slots__ = ("destination", "flow", "ip", "numbered")

    def __init__(self, own: str, ip: str, numbered: bool) -> None:
        self.ip = ip
        self.destination = Address(ip, ROCE_PORT)
        self.flow = flow_of(own, ip, ROCE_PORT)
        self.numbered = numbered


@lru_cache(maxsize=1024)
def incoming_flow(own: str, ip: str, port: int) -> Flow:
    """The flow of a datagram that came from `ip` and `port`. ValueError for mixed address families."""
    return flow_of(ip, own, port)
