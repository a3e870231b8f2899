"""One slot on flash: a header block that proves what the slot holds, then the value in sealed units.

Layout of the header block, 4,096 bytes, little-endian:
     0  8  magic "g35slot1"
     8  1  suite (agent/inline/cipher_suites.py)
     9  1  unit size as a power of two
    10  6  zero
    16  8  fingerprint of the volume's data key, so that a wrong key is told from damage
    24 24  salt of this write
    48 16  zero
    64 4016  sealed under unit number 0xFFFFFFFF, with the 64 bytes above authenticated:
             0 16  tenant          16 16  volume         32 16  key
            48  8  generation      56  8  stored at, microseconds since the epoch
            64  4  length of the value in bytes          68  4  expiry, seconds since the epoch; 0: none
            72  2  number of units                       74  6  zero
            80 16  proof of unit 0, then of unit 1, …; zero to the end
  4080 16  proof of the header
The value follows at 4,096. Unit n lies at n times the unit size; the last one is padded with zeros to
the LBA size before it is sealed, so that every byte that is read back is also proven.

A unit is bound to the salt, the tenant, the volume, the key and the generation (`SlotCodec.bound`), and the
header to the length and to the proofs of all units. A slot that does not open as exactly what was asked for
is a miss with a cause; there is no other way to fail.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

from agent.inline.cipher_suites import (
    PROOF_BYTES,
    SALT_BYTES,
    SUITES,
    UNIT_BYTES_MAX,
    Place,
    SlotCipher,
    Suite,
)
from agent.inline.key_use import KeyUse
from agent.inline.random_bytes import random_bytes
from agent.inline.salts import new_salt
from agent.inline.scatter import Buffer, Target
from agent.inline.secrets import SecretKey
from agent.pool.counters import MissCause
from agent.pool.format.directory import KEY_BYTES
from agent.pool.format.header_cache import HeaderCache

HEADER_BYTES: Final = 4096
MAGIC: Final = b"g35slot1"
_NO_MAGIC: Final = bytes(len(MAGIC))
_ZERO: Final = bytes(6)
_ZEROS: Final = bytes(16)
UNITS_MAX: Final = 64
UNIT_BYTES_MIN: Final = 1 << 16

_PRELUDE: Final = struct.Struct("<8sBB6s8s24s16s")
_SEALED: Final = struct.Struct("<16s16s16sQQIIH6s")
_PROVEN: Final = struct.Struct("<32x16sQQIIH")
"""What of the sealed text is not compared as it is."""
_SEALED_AT: Final[int] = _PRELUDE.size
_SALT_AT: Final = 24
_SALT: Final = struct.Struct(f"{_SALT_AT}x{SALT_BYTES}s")
_PROOFS_AT: Final[int] = _SEALED.size
_SEALED_BYTES: Final = HEADER_BYTES - _SEALED_AT - PROOF_BYTES
assert _PRELUDE.size == 64
assert _SEALED.size == 80
assert _SEALED.size + UNITS_MAX * PROOF_BYTES <= _SEALED_BYTES


class SlotCodec:
    """Seals and opens the slots of one volume: its identity, its data key, its suite, its unit size."""

    def __init__(
        self,
        tenant: bytes,
        volume: bytes,
        data_key: SecretKey,
        suite: str,
        unit_bytes: int,
        lba_bytes: int = 4096,
        *,
        epoch: int = 0,
        others: "Sequence[SlotCodec]" = (),
    ) -> None:
        """`epoch` numbers the volume's data keys. `others` open what was sealed under another one of them."""
        if not UNIT_BYTES_MIN <= unit_bytes <= UNIT_BYTES_MAX or unit_bytes & (unit_bytes - 1):
            raise ValueError(f"a unit of {unit_bytes} bytes is no power of two from 64 KiB to 1 MiB")
        self.tenant = tenant
        self.volume = volume
        self.unit_bytes = unit_bytes
        self.lba_bytes = lba_bytes
        self.suite: Suite = SUITES[suite](data_key)
        self._suite_number: int = self.suite.number
        self._unit_log2 = unit_bytes.bit_length() - 1
        self.fingerprint = data_key.fingerprint()
        self._begins = MAGIC + bytes((self._suite_number, self._unit_log2)) + _ZERO + self.fingerprint
        """The first bytes of every header that is sealed here, up to its salt."""
        self._owner = tenant + volume
        """The first bytes of its text."""
        self.epoch = epoch
        self._others = tuple(others)
        self._use: KeyUse | None = None
        self._bound_to = hashlib.blake2b(tenant + volume, digest_size=32, person=b"g35 slot unit")
        self._tag_of = hashlib.blake2b(tenant + volume, digest_size=4, person=b"g35 entry")
        """The beginning of `bound` and `tag` for every value of the volume."""
        self.proven_headers: Final[HeaderCache[OpenSlot]] = HeaderCache()

    def count_in(self, use: KeyUse) -> None:
        """Count there what is sealed from now on."""
        self._use = use

    @property
    def is_used_up(self) -> bool:
        """Its key must not seal any more."""
        return self._use is not None and self._use.is_used_up

    @property
    def used_part(self) -> float:
        """Of what its key may seal, 0 to 1."""
        return self._use.part if self._use is not None else 0.0

    def opens(self, other: "SlotCodec") -> bool:
        if other.fingerprint == self.fingerprint:
            return True
        return any(each.fingerprint == other.fingerprint for each in self._others)

    def of_key(self, fingerprint: bytes) -> "SlotCodec | None":
        """That which seals by the data key of this fingerprint, of those that open here."""
        return next((each for each in (self, *self._others) if each.fingerprint == fingerprint), None)

    @property
    def oldest_epoch(self) -> int:
        """Of the keys that open here; a slot under an older one was left behind by a rotation."""
        return min(each.epoch for each in (self, *self._others))

    def bound(self, key: bytes, generation: int, salt: bytes) -> bytes:
        """32 bytes that stand for tenant, volume, key, generation and this one write; authenticated with
        every unit."""
        digest = self._bound_to.copy()
        digest.update(key + generation.to_bytes(8, "little") + salt)
        return digest.digest()

    def tag(self, key: bytes, generation: int) -> int:
        """The 32 bits of the identity that stand in the directory."""
        digest = self._tag_of.copy()
        digest.update(key + generation.to_bytes(8, "little"))
        return int.from_bytes(digest.digest(), "little")

    def padded(self, length: int) -> int:
        """How many bytes a value of `length` takes on flash, without its header."""
        return -(-length // self.lba_bytes) * self.lba_bytes

    def seal(self, key: bytes, generation: int, place: Place) -> "SlotSealer":
        if self._use is not None:
            self._use.count()
        return SlotSealer(self, key, generation, place)

    def open(
        self, header: memoryview, key: bytes | None, place: Place, generation: int | None = None
    ) -> "OpenSlot | MissCause":
        """What the header proves, or why it proves nothing of `key` and `generation` (any, where None)."""
        salt: bytes = _SALT.unpack_from(header)[0]
        opened = self.proven_headers.find(salt, header, place)
        if opened is None:
            whole = bytes(header)  # what is proven is what is kept, whatever becomes of the buffer
            salt = whole[_SALT_AT : _SALT_AT + SALT_BYTES]
            proven = self._prove(whole, place)
            if isinstance(proven, MissCause):
                return proven
            opened = proven
            if opened.codec is self:
                self.proven_headers.keep(salt, whole, place, opened)
        if (key is not None and opened.key != key) or (
            generation is not None and opened.generation != generation
        ):
            # A slot since reused: the directory that led here was old.
            return MissCause.EVICTED
        return opened

    def _prove(self, header: bytes, place: Place) -> "OpenSlot | MissCause":
        """What the header proves of any key, without the cache."""
        is_ours = header.startswith(self._begins) and header.startswith(_ZEROS, _SALT_AT + SALT_BYTES)
        if not is_ours:
            return self._prove_anothers(header, place)
        salt = header[_SALT_AT : _SALT_AT + SALT_BYTES]
        cipher = self.suite.slot(salt, place)
        plain = bytearray(_SEALED_BYTES)
        sealed = memoryview(header)[_SEALED_AT:]
        if not cipher.open_header(sealed, memoryview(plain), header[:_SEALED_AT]):
            return MissCause.CORRUPT
        if not plain.startswith(self._owner):
            return MissCause.CORRUPT
        found: bytes
        made: int
        stored_us: int
        length: int
        expiry: int
        units: int
        found, made, stored_us, length, expiry, units = _PROVEN.unpack_from(plain)
        if units != -(-length // self.unit_bytes) or units > UNITS_MAX:
            return MissCause.CORRUPT
        proofs = bytes(plain[_PROOFS_AT : _PROOFS_AT + units * PROOF_BYTES])
        bound = self.bound(found, made, salt)
        return OpenSlot(self, cipher, found, made, bound, length, expiry, stored_us, proofs)

    def _prove_anothers(self, header: bytes, place: Place) -> "OpenSlot | MissCause":
        """Of a header that does not begin as those do that are sealed here: another key's, or none."""
        magic: bytes
        suite: int
        unit_log2: int
        fingerprint: bytes
        magic, suite, unit_log2, _, fingerprint, _, _ = _PRELUDE.unpack_from(header)
        if magic == _NO_MAGIC and not any(header):
            # Freed by a delete, which zeroes the header, or trimmed: an old directory led here.
            return MissCause.EVICTED
        if magic != MAGIC or suite != self._suite_number or unit_log2 != self._unit_log2:
            return MissCause.CORRUPT
        if fingerprint == self.fingerprint:
            return MissCause.CORRUPT  # Bytes that are zero are not.
        for other in self._others:
            if other.fingerprint == fingerprint:
                return other.open(memoryview(header), None, place)
        return MissCause.WRONG_KEY


class SlotSealer:
    """One write of one slot: units in any order, then the header."""

    __slots__ = ("_bound", "_cipher", "_key", "_proofs", "_salt", "_sealed", "codec", "generation")

    def __init__(self, codec: SlotCodec, key: bytes, generation: int, place: Place) -> None:
        self.codec = codec
        self.generation = generation
        self._key = key
        self._salt = new_salt(key, generation, place.nguid, place.slot)
        self._cipher: SlotCipher = codec.suite.slot(self._salt, place)
        self._bound = codec.bound(key, generation, self._salt)
        self._sealed = 0
        """A bit for each unit that is sealed, all bits once the header is. A put that waits is to cost little
        memory."""
        self._proofs = bytearray()

    def tag(self) -> int:
        """What stands for the slot's identity in the directory."""
        return self.codec.tag(self._key, self.generation)

    def seal(self, first_unit: int, plain: memoryview, into: memoryview) -> int:
        """Seal whole units of `plain`, numbered from `first_unit`, into `into`; how many bytes they take.

        Only the last unit of a value may be short, and is padded. A unit is sealed once: with a fresh
        salt a write, sealing another text under the same number would break GCM. Where `into` is longer
        than what is sealed, the 16 bytes behind that may be overwritten.
        """
        codec = self.codec
        unit_bytes, room = codec.unit_bytes, len(into)
        done = 0
        number = first_unit
        while done < len(plain):
            part = plain[done : done + unit_bytes]
            taken = codec.padded(len(part))
            if self._sealed >> number & 1:
                raise ValueError(f"unit {number} of this write is sealed already")
            source: Buffer = part
            if taken != len(part):
                padded = bytearray(taken)
                padded[: len(part)] = part
                source = padded
            end = done + taken
            if end + PROOF_BYTES <= room:
                with_room = into[done : end + PROOF_BYTES]
                proof = self._cipher.seal_with_room(number, source, with_room, self._bound)
            else:
                proof = self._cipher.seal_unit(number, source, into[done:end], self._bound)
            self._sealed |= 1 << number
            at = number * PROOF_BYTES
            if len(self._proofs) < at:
                self._proofs.extend(bytes(at - len(self._proofs)))
            self._proofs[at : at + PROOF_BYTES] = proof
            done = end
            number += 1
        return done

    def header(self, length: int, *, expiry: int, stored_us: int) -> bytes:
        """The header block, once every unit is sealed."""
        block = bytearray(HEADER_BYTES)
        self.header_into(memoryview(block), length, expiry, stored_us)
        return bytes(block)

    def header_into(self, block: memoryview, length: int, expiry: int, stored_us: int) -> None:
        codec = self.codec
        units = -(-length // codec.unit_bytes)
        if self._sealed != (1 << units) - 1:
            raise ValueError(f"{self._sealed:b} are not the units of {length} bytes")
        self._sealed = -1  # the header has one nonce, too
        prelude = _PRELUDE.pack(
            MAGIC,
            codec.suite.number,
            codec.unit_bytes.bit_length() - 1,
            _ZERO,
            codec.fingerprint,
            self._salt,
            _ZEROS,
        )
        plain = bytearray(_SEALED_BYTES)
        _SEALED.pack_into(
            plain,
            0,
            codec.tenant,
            codec.volume,
            self._key,
            self.generation,
            stored_us,
            length,
            expiry,
            units,
            _ZERO,
        )
        plain[_SEALED.size : _SEALED.size + len(self._proofs)] = self._proofs
        block[:_SEALED_AT] = prelude
        self._cipher.seal_header(plain, block[_SEALED_AT:HEADER_BYTES], prelude)


class OpenSlot:
    """A header that has proven itself; what is needed to open the units."""

    __slots__ = ("_proofs", "bound", "cipher", "codec", "expiry", "generation", "key", "length", "stored_us")

    def __init__(
        self,
        codec: SlotCodec,
        cipher: SlotCipher,
        key: bytes,
        generation: int,
        bound: bytes,
        length: int,
        expiry: int,
        stored_us: int,
        proofs: bytes,
    ) -> None:
        self.codec = codec
        self.cipher = cipher
        self.key = key
        self.generation = generation
        self.bound = bound
        self.length = length
        self.expiry = expiry
        self.stored_us = stored_us
        self._proofs = proofs
        """Those of all units in one: a value that is open is to cost little memory."""

    def _proof(self, number: int) -> bytes:
        return self._proofs[number * PROOF_BYTES : (number + 1) * PROOF_BYTES]

    def unit_span(self, offset: int, size: int) -> tuple[int, int, int, int]:
        """For a range of the value: first unit, one past the last, and their bytes on flash from/to."""
        unit_bytes = self.codec.unit_bytes
        first = offset // unit_bytes
        last = -(-min(offset + size, self.length) // unit_bytes)
        return first, last, first * unit_bytes, min(last * unit_bytes, self.codec.padded(self.length))

    def open_unit(self, number: int, sealed: memoryview, into: Target) -> bool:
        """Open one unit (all of it, with its padding) into a buffer of the same length."""
        return self.cipher.open_unit(number, sealed, into, self.bound, self._proof(number))

    def open_with_room(self, number: int, sealed_and_room: memoryview, into: memoryview) -> bool:
        """As `open_unit`, of a unit with `PROOF_BYTES` of room behind it (`SlotCipher.open_with_room`)."""
        return self.cipher.open_with_room(number, sealed_and_room, into, self.bound, self._proof(number))


assert len(MAGIC) == 8
assert KEY_BYTES == 16


def new_generation(wall: float) -> int:
    """A number that no other write has: microseconds since the epoch and a random byte."""
    # Its order only breaks ties between two entries of one key; a clock that jumps costs a hit at most.
    return int(wall * 1e6) << 8 | random_bytes(1)[0]
