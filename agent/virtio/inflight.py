"""Which requests a device had taken when it died: the inflight area (vhost-user, "Inflight I/O tracking").

The front-end keeps a shared memory file that the device makes and maps; each queue has a piece of it,
aligned to 64 bytes:

    0  features         u64   0
    8  version          u16   1
   10  queue size       u16
   12  last batch head  u16   the last chain whose completion was begun
   14  used idx         u16   the used ring's idx when the last completion had ended
   16  size x           0 in flight u8, 1 padding x 5, 6 next u16, 8 counter u64

A device sets `in flight` and gives `counter` a rising number before it touches a chain. When it
completes one, it notes the head in `last batch head`, moves the used ring's idx, clears `in flight`, and
writes the idx to `used idx`. A device that begins anew compares: where the used ring's idx is ahead of
`used idx`, it died between those steps and the last batch is done. Whatever is still in flight then is
served again, in the order of the counters.
"""

import struct
from typing import Final

ALIGNMENT: Final = 64
VERSION: Final = 1

HEAD: Final = struct.Struct("<QHHHH")
"""features, version, queue size, last batch head, used idx."""
ENTRY: Final = struct.Struct("<B5xHQ")
"""in flight, next, counter."""

HEAD_BYTES: Final = HEAD.size
ENTRY_BYTES: Final = ENTRY.size
assert HEAD_BYTES == ENTRY_BYTES == 16

VERSION_WORD: Final = 4
SIZE_WORD: Final = 5
LAST_BATCH_HEAD_WORD: Final = 6
USED_IDX_WORD: Final = 7
"""Places of 16-bit words in a queue's piece."""


def queue_bytes(size: int) -> int:
    """A queue's piece, its alignment included."""
    return (HEAD_BYTES + ENTRY_BYTES * size + ALIGNMENT - 1) & ~(ALIGNMENT - 1)


def in_flight_byte(head: int) -> int:
    """Place of `in flight` of a chain, in bytes of the queue's piece."""
    return HEAD_BYTES + ENTRY_BYTES * head


def counter_qword(head: int) -> int:
    """Place of `counter` of a chain, in 64-bit words of the queue's piece."""
    return (HEAD_BYTES + ENTRY_BYTES * head + 8) // 8
