"""`pyverbs.spec`: what packets a flow rule is about. Everything is refused."""

from __future__ import annotations

from emulator.roce.pyverbs.refused import Refused


class Spec(Refused):
    """A part of a rule."""

    __slots__ = ()


class EthSpec(Spec):
    """Ethernet addresses."""

    __slots__ = ()


class Ipv4ExtSpec(Spec):
    """IPv4 addresses."""

    __slots__ = ()


class Ipv6Spec(Spec):
    """IPv6 addresses."""

    __slots__ = ()


class TcpUdpSpec(Spec):
    """Ports."""

    __slots__ = ()
