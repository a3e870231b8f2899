"""Where the /fs face keeps the content of files: what it asks of the pool, and nothing more.

A *block* is written once under an identifier that no other block ever had, is read in ranges, is never
changed in place, and is deleted at last. So the store needs no notion of a file, an order or a transaction.
"""

import hashlib
import struct
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Protocol

from agent.pool.steps import Steps

BLOCK_ID_BYTES: Final = 16
FILE_SYSTEM_ID_BYTES: Final = 16

_NAMED_BY: Final = struct.Struct(">QQQ")
"""What an identifier is derived from: inode, position in the file (in blocks), version; big-endian."""


class StoreFull(Exception):
    """No slot of this capacity is free for this block. Nothing was stored. ENOSPC for the program."""


class StoreUnavailable(Exception):
    """The enclosure did not answer, or answered with a fault. Whether the block is there is unknown."""


class StoreUnreached(StoreUnavailable):
    """No enclosure that the block's identifier leads to is reached: nothing of it was sent or stored."""


class BlockStore(Protocol):
    """Immutable blocks in slots of a few capacities.

    All methods may be called by many threads at once. A buffer that is handed over is borrowed until the
    steps end. A block that was put is never dropped to make room for another: a store that has no room
    says so.
    """

    @property
    def capacities(self) -> tuple[int, ...]:
        """How many bytes fit into a slot of each kind, ascending, for example (65536, 1048576, 4194304)."""

    def put(self, block_id: bytes, capacity: int, data: memoryview) -> Steps[None]:
        """Store 1 to `capacity` bytes under a fresh identifier of 16 bytes.

        Raises `StoreFull` when no slot of this capacity is free and nothing was stored, and
        `StoreUnavailable` when it is not known whether it was.
        """

    def places(self, block_id: bytes, capacity: int) -> Collection[int]:
        """Where a block of this identifier would be put: any of these, by numbers of the store's own. A pure
        function, for choosing an identifier that leads elsewhere after `StoreUnreached`."""

    def get(self, block_id: bytes, capacity: int, offset: int, into: memoryview) -> Steps[bool]:
        """Fill `into` with the block's bytes from `offset` on; False when the block is not there, or does not
        prove itself. That is no reason to give it up: see `examine`.

        The range lies within what was put. Raises `StoreUnavailable` when an enclosure does not answer.
        """

    def comes_again(self) -> None:
        """The steps under way only read: as `IoChannel.comes_again`."""

    def examine(self, block_id: bytes, capacity: int) -> Steps[bytes | None]:
        """Read all of a block from the enclosures. None: it is there, whole. Otherwise what speaks against
        it, in bytes that are the same only for the very same finding.

        Raises `StoreUnavailable` where nothing can be said, and where what was found says less of the block
        than of an enclosure, or of this agent.
        """

    def give_up(self, block_id: bytes, capacity: int) -> Steps[None]:
        """The block is lost, and no file has it any more: see to its slot, as far as that can be done."""

    def delete(self, block_id: bytes, capacity: int) -> Steps[None]:
        """Free the slot. Deleting what is not there is no error.

        Raises `StoreUnavailable` where it may still be there, or a part of it; what can be freed then is.
        """

    def flush(self, blocks: Iterable[tuple[bytes, int]] | None = None) -> Steps[None]:
        """What was put before is durable on the enclosures, of all blocks or of `blocks` alone (identifier
        and capacity; asked for only where an enclosure does not flush). Raises `StoreUnavailable`."""

    def usage(self) -> tuple[int, int]:
        """Bytes that the slots can hold in all, and bytes that free slots can hold."""


def block_id(file_system_id: bytes, ino: int, position: int, version: int) -> bytes:
    """The identifier of a block: the same for nobody else, ever, because versions are never reused."""
    name = _NAMED_BY.pack(ino, position, version)
    return hashlib.blake2b(name, digest_size=BLOCK_ID_BYTES, key=file_system_id).digest()


def fitting(capacities: Sequence[int], length: int) -> tuple[int, ...]:
    """The capacities that `length` bytes fit into, the tightest first."""
    return tuple(capacity for capacity in capacities if capacity >= length)
