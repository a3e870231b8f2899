"""Finite-field Diffie-Hellman in the groups of RFC 7919, with keys that serve for one exchange.

The moduli are made from their definition (appendix A): 2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1,
with e of natural logarithms and X the least that makes the number a safe prime. The generator is 2.

`pow` takes a time that depends on the exponent, and keeps the interpreter lock. Exponents are fresh for every
exchange, of one length, and used twice, so an attacker has two measurements of each and never more. They are
as short as RFC 7919 recommends (rounded up to 32 bits), so that it takes milliseconds. Our binding of OpenSSL
marks these groups deprecated and will lose them.
"""

import secrets
from functools import cache
from typing import Final, NamedTuple

from nvmeof.wire.authentication import GroupId


class _Shape(NamedTuple):
    bits: int
    x: int
    exponent_bits: int


_SHAPES: Final = {
    GroupId.FFDHE2048: _Shape(2048, 560316, 256),
    GroupId.FFDHE3072: _Shape(3072, 2625351, 288),
    GroupId.FFDHE4096: _Shape(4096, 5736041, 352),
    GroupId.FFDHE6144: _Shape(6144, 15705020, 384),
    GroupId.FFDHE8192: _Shape(8192, 10965728, 416),
}
_GENERATOR: Final = 2
_GUARD_BITS: Final = 64


class BadPublicValue(ValueError):
    """The peer's DH value is not one: of the wrong length, or a value that makes the result known."""


def _scaled_e(bits: int) -> int:
    """floor(2^bits e), by the series of 1 / n!; guard bits take the errors of rounding."""
    term = 1 << (bits + _GUARD_BITS)
    total, n = 0, 1
    while term:
        total += term
        term //= n
        n += 1
    return total >> _GUARD_BITS


@cache
def modulus(group: GroupId) -> int:
    """The prime of a group. KeyError for NULL, which has none."""
    bits, x, _ = _SHAPES[group]
    return (1 << bits) - (1 << (bits - 64)) + ((_scaled_e(bits - 130) + x) << 64) - 1


def value_bytes(group: GroupId) -> int:
    """The length of a DH value, and of the shared secret; 0 for NULL."""
    return 0 if group is GroupId.NULL else _SHAPES[group].bits // 8


class KeyPair:
    """One side of one exchange. `public` is what the peer gets: big-endian, as long as the modulus."""

    __slots__ = ("_exponent", "group", "public")

    def __init__(self, group: GroupId) -> None:
        bits = _SHAPES[group].exponent_bits
        self.group = group
        self._exponent = secrets.randbits(bits) | 1 << (bits - 1)
        self.public = pow(_GENERATOR, self._exponent, modulus(group)).to_bytes(value_bytes(group))

    def __repr__(self) -> str:
        return f"<DH key pair, {self.group.name}>"

    def shared(self, peer: bytes) -> bytes:
        """The secret that both sides have, as long as the modulus. Raises `BadPublicValue`.

        In a group of a safe prime the values that lie in a small subgroup are 1 and p - 1 (SP 800-56A,
        5.6.2.3.1). Our own value sent back is refused too: nobody has it by chance.
        """
        prime = modulus(self.group)
        if len(peer) != value_bytes(self.group):
            raise BadPublicValue(f"a DH value of {len(peer)} bytes in {self.group.name.lower()}")
        value = int.from_bytes(peer)
        if not 2 <= value <= prime - 2:
            raise BadPublicValue("a DH value that makes the session key known")
        if peer == self.public:
            raise BadPublicValue("our own DH value came back")
        return pow(value, self._exponent, prime).to_bytes(value_bytes(self.group))
