"""A suite that seals nothing: proofs and headers as a real suite has them, and no byte of a value is touched.

The values of a simulation have their real lengths and no contents. What can go wrong with a slot all the same
(another write's header, another key's, a header that is not there) is told by the proofs, as in the agent.
"""

from typing import ClassVar

from agent.inline.cipher_suites import PROOF_BYTES, Place, Plain, SlotCipher
from agent.inline.scatter import Buffer, Target

_BOUND = PROOF_BYTES - 4


class StandInSlot:
    """A unit's proof is its number and the beginning of what it is bound to."""

    scatters = True

    def seal_unit(self, number: int, plain: Buffer, into: memoryview, bound: bytes) -> bytes:
        return number.to_bytes(4, "little") + bound[:_BOUND]

    def seal_with_room(self, number: int, plain: Buffer, into_and_room: memoryview, bound: bytes) -> bytes:
        return number.to_bytes(4, "little") + bound[:_BOUND]

    def open_unit(self, number: int, sealed: Buffer, into: Target, bound: bytes, proof: bytes) -> bool:
        return proof == number.to_bytes(4, "little") + bound[:_BOUND]

    def open_with_room(
        self, number: int, sealed_and_room: memoryview, into: memoryview, bound: bytes, proof: bytes
    ) -> bool:
        return proof == number.to_bytes(4, "little") + bound[:_BOUND]

    def seal_header(self, plain: Buffer, into: memoryview, bound: bytes) -> None:
        # The prelude's last bytes are zero; its salt is what no other write has.
        into[:-PROOF_BYTES] = plain
        into[-PROOF_BYTES:] = bound[24:40]

    def open_header(self, sealed: Buffer, into: memoryview, bound: bytes) -> bool:
        text = memoryview(sealed)
        into[:] = text[:-PROOF_BYTES]
        return bytes(text[-PROOF_BYTES:]) == bound[24:40]


class StandInSuite:
    """In the place of `plain+crc64`, by its number, within a simulation."""

    name: ClassVar[str] = "stand-in"
    number: ClassVar[int] = Plain.number
    reads_text_again: ClassVar[bool] = False

    def __init__(self) -> None:
        self._slot = StandInSlot()

    def slot(self, salt: bytes, place: Place) -> SlotCipher:
        return self._slot
