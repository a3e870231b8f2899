"""Connections of clients that have not authenticated yet.

Anybody who reaches the port may connect. So a connection counts against its peer until a request showed a
known key or token, and a peer has at most as many as it leaves to others. From then on it counts against the
tenant, who has a share of them (shares.py).

Beyond that the oldest connection without a key gives way to a new one: of the same peer, or of any peer where
that has none. A client sends its first request within milliseconds; an idle connection sends none. So an
attacker keeps other clients of its address out only while it connects faster than they send.
"""

from collections import OrderedDict
from typing import Final

import trio

from agent.host_os.per_user_bounds import Bound

KNOWN: Final = "clients with a key"


class UnprovenClient:
    """One connection, counted."""

    def __init__(self, clients: "UnprovenClients", peer: str) -> None:
        self._clients = clients
        self.holder = peer
        """Who has its place in the books; empty where it has none."""
        self.scope = trio.CancelScope()
        """What serves it; cancelled where it gives way."""

    def identify(self) -> None:
        """It has shown a key. Idempotent."""
        self._clients.identify(self)

    def leave(self) -> None:
        """It has ended. Idempotent."""
        self._clients.leave(self)


class UnprovenClients:
    """The connections of one door. Lives in its event loop."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._unproven: OrderedDict[UnprovenClient, None] = OrderedDict()
        """The oldest comes first."""

    def enter(self, peer: str) -> UnprovenClient | None:
        """A new connection of a peer, counted; None where there is no room and nobody gives way."""
        client = UnprovenClient(self, peer)
        if not self._bound.take(peer):
            oldest = self._oldest(peer)
            if oldest is None:
                return None
            self._bound.pass_on(oldest.holder, peer)
            oldest.holder = ""
            self._end(oldest)
        self._unproven[client] = None
        return client

    def make_room(self) -> None:
        """The oldest ends, of whatever peer."""
        if (oldest := next(iter(self._unproven), None)) is not None:
            self._end(oldest)

    def _oldest(self, peer: str) -> UnprovenClient | None:
        own = (client for client in self._unproven if client.holder == peer)
        return next(own, None) or next(iter(self._unproven), None)

    def _end(self, client: UnprovenClient) -> None:
        del self._unproven[client]
        client.scope.cancel()

    def identify(self, client: UnprovenClient) -> None:
        if client in self._unproven:
            del self._unproven[client]
            self._bound.pass_on(client.holder, KNOWN)
            client.holder = KNOWN

    def leave(self, client: UnprovenClient) -> None:
        self._unproven.pop(client, None)
        if client.holder:
            self._bound.give_back(client.holder)
            client.holder = ""
