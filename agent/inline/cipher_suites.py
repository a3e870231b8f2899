"""The cipher suites: how one slot is sealed and opened.

A slot is a header block and a value. The value is sealed in units (64 KiB to 1 MiB), so that a range
read opens only what it needs and opening overlaps with receiving. Each unit has a 16-byte proof of its
own, and the header, sealed last, carries the proofs of all units with the identity of the whole. The
order of trust is therefore: header proves identity, length and proofs; a proof proves its unit.

`Suite.slot` returns a `SlotCipher` for one write of one slot. What sets the suites apart:

aes-256-gcm
    A fresh key for every write, derived from the volume's key and 12 random bytes exactly as
    XAES-256-GCM does (C2SP XAES-256-GCM, from NIST SP 800-108r1 with CMAC). The GCM nonce is 8 further
    random bytes and the number of the unit. The pair (key, nonce) would repeat only if 160 random bits
    did: at 2^64 slot writes a volume that has a chance of 2^-33, and no counter has to survive a crash
    or be agreed between agents. One derived key seals at most 65 messages of at most 1 MiB.
aes-256-xts+crc64
    What a BlueField does inline. One data unit a unit of the slot: the key belongs to the namespace, the
    tweak is the place (slot and unit), and CRC-64/NVME over the identity and the plain text is sealed in
    the header. A CRC is no MAC: an attacker who writes to the flash *and* knows a plain text can forge; see
    docs/security.md. OpenSSL restarts the tweak at every update, so a unit is one context and one
    `update_into`, always; 1 MiB is 2^16 blocks, well under the limit of 2^20 (SP 800-38E).
plain+crc64
    The same without the cipher, to measure what the cipher costs.

An engine for mlx5 crypto and signature MKEYs would be one more `Suite`, whose `seal_unit` only sets up
what the NIC is to do.
"""

import hmac
import struct
from typing import ClassVar, Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from agent.inline.crc64 import crc64, engine
from agent.inline.scatter import Buffer, Target
from agent.inline.secrets import SecretKey
from agent.inline.single_block_aes import BlockCipher

PROOF_BYTES: Final = 16
SALT_BYTES: Final = 24
UNIT_BYTES_MAX: Final = 1 << 20
HEADER_UNIT: Final = 0xFFFF_FFFF
"""The number under which the header itself is sealed; a slot has far fewer units."""

_NUMBERS: Final = [number.to_bytes(4, "little") for number in range(64)]
"""Those of the units of a slot, as they stand in a nonce."""
_HEADER_NUMBER: Final = HEADER_UNIT.to_bytes(4, "little")
_CRC_PROOF: Final = struct.Struct("<Q8x")
_TWEAK: Final = struct.Struct("<QII")


class Place:
    """Where a slot lies, as far as a cipher cares: the namespace and the slot's number in it."""

    __slots__ = ("nguid", "slot")

    def __init__(self, nguid: bytes, slot: int) -> None:
        self.nguid: Final = nguid
        self.slot: Final = slot


class SlotCipher(Protocol):
    """Seals or opens the units and the header of one write of one slot."""

    @property
    def scatters(self) -> bool:
        """Whether `open_unit` opens into a buffer that lies in several places."""

    def seal_unit(self, number: int, plain: Buffer, into: memoryview, bound: bytes) -> bytes:
        """Seal `plain` into `into` (same length); the 16-byte proof. `bound` is authenticated with it."""

    def open_unit(self, number: int, sealed: Buffer, into: Target, bound: bytes, proof: bytes) -> bool:
        """Open into `into` (same length). False: it is not what was sealed, and `into` must not be used."""

    def seal_with_room(self, number: int, plain: Buffer, into_and_room: memoryview, bound: bytes) -> bytes:
        """As `seal_unit`, with `PROOF_BYTES` of room behind what is sealed, which are overwritten."""

    def open_with_room(
        self, number: int, sealed_and_room: memoryview, into: memoryview, bound: bytes, proof: bytes
    ) -> bool:
        """As `open_unit`, in one piece, with `PROOF_BYTES` of room behind the sealed bytes, which may be
        overwritten. For ciphers that want text and proof in one."""

    def seal_header(self, plain: Buffer, into: memoryview, bound: bytes) -> None:
        """Seal the header's text into `into`, which is 16 bytes longer: the proof follows the text."""

    def open_header(self, sealed: Buffer, into: memoryview, bound: bytes) -> bool:
        """Open what `seal_header` sealed; False as in `open_unit`."""


class Suite(Protocol):
    """One way to seal; `number` stands in every slot's header and never changes its meaning."""

    name: ClassVar[str]
    number: ClassVar[int]
    reads_text_again: ClassVar[bool]
    """Whether its proof is made of the text, beside the cipher: then that must not change meanwhile."""

    def slot(self, salt: bytes, place: Place) -> SlotCipher: ...


class _GcmSlot:
    scatters = True

    def __init__(self, key: bytes, nonce_prefix: bytes) -> None:
        self._key = key
        self._algorithm: algorithms.AES256 | None = None
        self._aead: AESGCM | None = None
        self._nonce_prefix = nonce_prefix

    def _in_parts(self) -> algorithms.AES256:
        if self._algorithm is None:
            self._algorithm = algorithms.AES256(self._key)
        return self._algorithm

    def _at_once(self) -> AESGCM:
        if self._aead is None:
            self._aead = AESGCM(self._key)
        return self._aead

    # Where the proof lies, or may be laid, behind the text, the one-shot AEAD does with one call what takes a
    # context, three calls and a dozen of Python's within the library. It gives the GIL away where there is
    # much to do.
    def seal_header(self, plain: Buffer, into: memoryview, bound: bytes) -> None:
        self._at_once().encrypt_into(self._nonce_prefix + _HEADER_NUMBER, plain, bound, into)

    def open_header(self, sealed: Buffer, into: memoryview, bound: bytes) -> bool:
        try:
            self._at_once().decrypt_into(self._nonce_prefix + _HEADER_NUMBER, sealed, bound, into)
        except InvalidTag:
            return False
        return True

    def seal_unit(self, number: int, plain: Buffer, into: memoryview, bound: bytes) -> bytes:
        nonce = self._nonce_prefix + number.to_bytes(4, "little")
        encryptor = Cipher(self._in_parts(), modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(bound)
        encryptor.update_into(plain, into)
        encryptor.finalize()
        return encryptor.tag

    def seal_with_room(self, number: int, plain: Buffer, into_and_room: memoryview, bound: bytes) -> bytes:
        nonce = self._nonce_prefix + number.to_bytes(4, "little")
        self._at_once().encrypt_into(nonce, plain, bound, into_and_room)
        return bytes(into_and_room[-PROOF_BYTES:])

    def open_unit(self, number: int, sealed: Buffer, into: Target, bound: bytes, proof: bytes) -> bool:
        nonce = self._nonce_prefix + number.to_bytes(4, "little")
        decryptor = Cipher(self._in_parts(), modes.GCM(nonce, proof)).decryptor()
        decryptor.authenticate_additional_data(bound)
        if isinstance(into, memoryview):
            decryptor.update_into(sealed, into)
        else:
            at = 0
            for run in into.runs:
                decryptor.update_into(sealed[at : at + len(run)], run)
                at += len(run)
        try:
            decryptor.finalize()
        except InvalidTag:
            return False
        return True

    def open_with_room(
        self, number: int, sealed_and_room: memoryview, into: memoryview, bound: bytes, proof: bytes
    ) -> bool:
        sealed_and_room[-PROOF_BYTES:] = proof
        try:
            self._at_once().decrypt_into(self._nonce_prefix + _NUMBERS[number], sealed_and_room, bound, into)
        except InvalidTag:
            return False
        return True


def _double(block: bytes) -> bytes:
    """Doubling in GF(2^128), for the CMAC subkey (NIST SP 800-38B, 6.1)."""
    value = int.from_bytes(block, "big") << 1
    if value >> 128:
        value = (value & ((1 << 128) - 1)) ^ 0x87
    return value.to_bytes(16, "big")


class AesGcm:
    """aes-256-gcm, the default."""

    name: ClassVar[str] = "aes-256-gcm"
    number: ClassVar[int] = 1
    reads_text_again: ClassVar[bool] = False

    def __init__(self, data_key: SecretKey) -> None:
        self._blocks = BlockCipher(data_key.reveal()[:32])
        subkey = _double(self._blocks.encrypt(bytes(16)))
        self._first = int.from_bytes(subkey, "big") ^ int.from_bytes(b"\0\x01X\0" + bytes(12), "big")
        self._second = int.from_bytes(subkey, "big") ^ int.from_bytes(b"\0\x02X\0" + bytes(12), "big")

    def derived_key(self, salt12: bytes) -> bytes:
        """The 32-byte key that XAES-256-GCM derives for the first 12 bytes of its nonce."""
        salt = int.from_bytes(salt12, "big")
        return self._blocks.encrypt(
            (self._first ^ salt).to_bytes(16, "big") + (self._second ^ salt).to_bytes(16, "big")
        )

    def slot(self, salt: bytes, place: Place) -> SlotCipher:
        return _GcmSlot(self.derived_key(salt[:12]), salt[12:20])


class _CrcSlot:
    """Units proven by a CRC over what they are bound to and their plain text; in the clear."""

    scatters = False  # XTS begins its tweak anew at every update, so a unit is opened in one piece

    def seal_unit(self, number: int, plain: Buffer, into: memoryview, bound: bytes) -> bytes:
        self._encrypt(number, plain, into)
        return _CRC_PROOF.pack(crc64(plain, crc64(bound + number.to_bytes(4, "little"))))

    def seal_with_room(self, number: int, plain: Buffer, into_and_room: memoryview, bound: bytes) -> bytes:
        return self.seal_unit(number, plain, into_and_room[:-PROOF_BYTES], bound)

    def open_unit(self, number: int, sealed: Buffer, into: Target, bound: bytes, proof: bytes) -> bool:
        assert isinstance(into, memoryview), "a caller with another buffer asks `scatters` first"
        self._decrypt(number, sealed, into)
        found = _CRC_PROOF.pack(crc64(into, crc64(bound + number.to_bytes(4, "little"))))
        return hmac.compare_digest(found, proof)

    def open_with_room(
        self, number: int, sealed_and_room: memoryview, into: memoryview, bound: bytes, proof: bytes
    ) -> bool:
        return self.open_unit(number, sealed_and_room[:-PROOF_BYTES], into, bound, proof)

    def seal_header(self, plain: Buffer, into: memoryview, bound: bytes) -> None:
        into[-PROOF_BYTES:] = self.seal_unit(HEADER_UNIT, plain, into[:-PROOF_BYTES], bound)

    def open_header(self, sealed: Buffer, into: memoryview, bound: bytes) -> bool:
        text = memoryview(sealed)
        proof = bytes(text[-PROOF_BYTES:])
        return self.open_unit(HEADER_UNIT, text[:-PROOF_BYTES], into, bound, proof)

    def _encrypt(self, number: int, plain: Buffer, into: memoryview) -> None:
        into[:] = plain

    def _decrypt(self, number: int, sealed: Buffer, into: memoryview) -> None:
        into[:] = sealed


class _XtsSlot(_CrcSlot):
    def __init__(self, key: algorithms.AES256 | algorithms.AES, slot: int) -> None:
        self._algorithm = key
        self._slot = slot

    def _mode(self, number: int) -> modes.XTS:
        return modes.XTS(_TWEAK.pack(self._slot, number, 0))

    def _encrypt(self, number: int, plain: Buffer, into: memoryview) -> None:
        encryptor = Cipher(self._algorithm, self._mode(number)).encryptor()
        encryptor.update_into(plain, into)
        encryptor.finalize()

    def _decrypt(self, number: int, sealed: Buffer, into: memoryview) -> None:
        decryptor = Cipher(self._algorithm, self._mode(number)).decryptor()
        decryptor.update_into(sealed, into)
        decryptor.finalize()


class AesXts:
    """aes-256-xts+crc64: the cipher that a DPU's NIC applies inline."""

    name: ClassVar[str] = "aes-256-xts+crc64"
    number: ClassVar[int] = 2
    reads_text_again: ClassVar[bool] = True

    def __init__(self, data_key: SecretKey) -> None:
        engine()  # loaded now: the first request has its deadline
        self._data_key = data_key
        self._namespace_keys: dict[bytes, algorithms.AES] = {}

    def slot(self, salt: bytes, place: Place) -> SlotCipher:
        key = self._namespace_keys.get(place.nguid)
        if key is None:
            # One entry a namespace of the pool map, which is bounded; two threads may both derive it.
            derived = self._data_key.derive("xts namespace", place.nguid, length=64)
            key = self._namespace_keys[place.nguid] = algorithms.AES(derived.reveal())
        return _XtsSlot(key, place.slot)


class Plain:
    """plain+crc64: for measuring what the cipher costs."""

    name: ClassVar[str] = "plain+crc64"
    number: ClassVar[int] = 3
    reads_text_again: ClassVar[bool] = True

    def __init__(self, data_key: SecretKey) -> None:
        engine()
        self._slot = _CrcSlot()

    def slot(self, salt: bytes, place: Place) -> SlotCipher:
        return self._slot


SUITES: Final[dict[str, type[AesGcm] | type[AesXts] | type[Plain]]] = {
    suite.name: suite for suite in (AesGcm, AesXts, Plain)
}
