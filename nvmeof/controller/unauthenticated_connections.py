"""Connections that have proven nothing yet, and which of them gives way when there are many.

A stranger may open as many connections as the network carries, and must not take those that a host with a
secret needs. These guests have a bound, a bound for each peer address, and a rule for newcomers:

* where another address has more members than the newcomer's, the oldest member of that address goes;
* otherwise the oldest member of the newcomer's own address (or of those with as many) goes, once it is
  `SETTLED_S` old: a host that has just come may finish what it does;
* otherwise the newcomer is refused.

So addresses get equal shares, and one that floods displaces itself. Changed with `Target.lock` held.
"""

import ipaddress
from collections.abc import Container
from typing import Final

from nvmeof.controller.served_queue import ServedQueue

SETTLED_S: Final = 1.0
"""A member of this age may be displaced by a newcomer of its own address. Connect takes milliseconds, and an
authentication with the largest group less than half of this."""

DISPLACED: Final = "it had proven nothing and gave way to a newcomer"
"""Why such a connection ends."""

_IPV6_NETWORK_BITS: Final = 64


def peer_of(address: str) -> str:
    """The name under which connections from an address are counted.

    IPv6 peers are counted by network of 64 bits, because a peer with one of them has them all. A name that
    is no IP address counts by itself.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found), _IPV6_NETWORK_BITS), strict=False))


class GuestConnections:
    """At most `most` members, `most_of_a_peer` of one address. See above."""

    def __init__(self, most: int, most_of_a_peer: int) -> None:
        self.most = most
        self.most_of_a_peer = most_of_a_peer
        self.displaced = 0
        """Members that gave way to a newcomer."""
        self.refused = 0
        """Newcomers for which nobody gave way."""
        self._since: dict[ServedQueue, float] = {}  # in the order of their coming
        self._of_peer: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, session: object) -> bool:
        return session in self._since

    def admit(
        self, session: ServedQueue, now: float, *, full_of: Container[ServedQueue] | None = None
    ) -> bool:
        """Take a newcomer in; False where nobody gives way. Who gives way is told to end at once.

        `full_of`: the newcomer needs the place of one of these, whether or not the guests have room.
        """
        victim: ServedQueue | None = None
        if self._of_peer.get(session.peer, 0) >= self.most_of_a_peer:
            victim = self._settled(session.peer, now, full_of)
        elif len(self) >= self.most or full_of is not None:
            victim = self._victim(session.peer, now, full_of)
        else:
            self._enter(session, now)
            return True
        if self._gives_way(victim):
            self._enter(session, now)
        return victim is not None

    def make_room(self, peer: str, now: float, among: Container[ServedQueue]) -> ServedQueue | None:
        """Who of `among` gives way to a newcomer of `peer`, and is told so; None where nobody does."""
        victim = self._victim(peer, now, among)
        self._gives_way(victim)
        return victim

    def leave(self, session: ServedQueue) -> None:
        """It has proven itself, or has ended. Idempotent."""
        if self._since.pop(session, None) is None:
            return
        left = self._of_peer[session.peer] - 1
        if left:
            self._of_peer[session.peer] = left
        else:
            del self._of_peer[session.peer]

    def described(self) -> dict[str, int]:
        return {"now": len(self), "displaced": self.displaced, "refused": self.refused}

    def _gives_way(self, victim: ServedQueue | None) -> bool:
        if victim is None:
            self.refused += 1
            return False
        self.displaced += 1
        self.leave(victim)
        victim.displace(DISPLACED)
        return True

    def _enter(self, session: ServedQueue, now: float) -> None:
        self._since[session] = now
        self._of_peer[session.peer] = self._of_peer.get(session.peer, 0) + 1

    def _victim(self, peer: str, now: float, among: Container[ServedQueue] | None) -> ServedQueue | None:
        """Who gives way to a newcomer of `peer` where all places are taken."""
        counts = self._of_peer
        if among is not None:
            counts = {}
            for session in self._since:
                if session in among:
                    counts[session.peer] = counts.get(session.peer, 0) + 1
        largest = max(counts.values(), default=0)
        found = (
            session
            for session in self._since
            if counts.get(session.peer, 0) == largest and (among is None or session in among)
        )
        oldest = next(found, None)
        if oldest is None or largest > counts.get(peer, 0) or now - self._since[oldest] >= SETTLED_S:
            return oldest
        return None

    def _settled(self, peer: str, now: float, among: Container[ServedQueue] | None) -> ServedQueue | None:
        """The oldest member of one address, if it is old enough."""
        found = (s for s in self._since if s.peer == peer and (among is None or s in among))
        oldest = next(found, None)
        return oldest if oldest is not None and now - self._since[oldest] >= SETTLED_S else None
