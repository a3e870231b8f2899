"""What the two sides compute: session key, augmented challenge, responses (NVMe Base 2.0, DH-HMAC-CHAP).

    KS = H(shared DH secret)              Ca = HMAC(KS, C) with a DH group, C itself without
    R1 = HMAC(Kh, Ca1 | S1 | T_ID | SC_C | "HostHost" | NQNh | 00h | NQNc)
    R2 = HMAC(Kc, Ca2 | S2 | T_ID | SC_C | "Controller" | NQNc | 00h | NQNh)

S is the sequence number (4 bytes), T_ID has 2 and SC_C one, little-endian. Kh and Kc are the transformed
secrets of host and subsystem. That the two labels differ is what makes a reflected response worthless.
"""

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import Final

from nvmeof.authentication.secret import HASH_NAMES, DhchapSecret
from nvmeof.wire.authentication import HashId

HASH_BYTES: Final = {HashId.SHA256: 32, HashId.SHA384: 48, HashId.SHA512: 64}
_NUMBERS: Final = struct.Struct("<IHB")
_NO_CONCATENATION: Final = 0


def new_challenge(hash_id: HashId) -> bytes:
    """As long as the hash."""
    return secrets.token_bytes(HASH_BYTES[hash_id])


@dataclass(frozen=True, slots=True)
class Exchange:
    """What both sides of one authentication agree on. `shared` is the DH secret, None without a group."""

    hash_id: HashId
    transaction: int
    host_nqn: str
    subsystem_nqn: str
    shared: bytes | None = None

    def __repr__(self) -> str:
        return f"<authentication {self.transaction} of {self.host_nqn} and {self.subsystem_nqn}>"

    def host_response(self, secret: DhchapSecret, challenge: bytes, sequence: int) -> bytes:
        """R1."""
        names = b"HostHost" + self.host_nqn.encode() + b"\0" + self.subsystem_nqn.encode()
        return self._response(secret.key_for(self.host_nqn), challenge, sequence, names)

    def controller_response(self, secret: DhchapSecret, challenge: bytes, sequence: int) -> bytes:
        """R2."""
        names = b"Controller" + self.subsystem_nqn.encode() + b"\0" + self.host_nqn.encode()
        return self._response(secret.key_for(self.subsystem_nqn), challenge, sequence, names)

    def _response(self, key: bytes, challenge: bytes, sequence: int, names: bytes) -> bytes:
        name = HASH_NAMES[self.hash_id]
        if self.shared is not None:
            session_key = hashlib.new(name, self.shared).digest()
            challenge = hmac.digest(session_key, challenge, name)
        numbers = _NUMBERS.pack(sequence, self.transaction, _NO_CONCATENATION)
        return hmac.digest(key, challenge + numbers + names, name)
