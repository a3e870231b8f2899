"""Features and asynchronous events (NVMe Base 2.0, 5.27 and 5.2).

Set Features  CDW10 7:0 FID, 31 SV (save)          CDW11 the value
Get Features  CDW10 7:0 FID, 10:8 SEL              CDW11 by feature
result        the value (Number of Queues: what was granted)
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from nvmeof.wire.bit_fields import Bits, Record


class Feature(IntEnum):
    """FID."""

    ARBITRATION = 0x01
    POWER_MANAGEMENT = 0x02
    TEMPERATURE_THRESHOLD = 0x04
    ERROR_RECOVERY = 0x05
    VOLATILE_WRITE_CACHE = 0x06
    QUEUE_COUNT = 0x07
    WRITE_ATOMICITY = 0x0A
    ASYNC_EVENT_CONFIG = 0x0B
    KEEP_ALIVE_TIMER = 0x0F
    COMMAND_SET_PROFILE = 0x19
    HOST_ID = 0x81


FEATURE_SAVE = 1 << 31


def encode_queue_count(submission: int, completion: int) -> int:
    """Value and result of Number of Queues. The counts (1 to 65535) are 0's based on the wire."""
    return submission - 1 | completion - 1 << 16


def decode_queue_count(value: int) -> tuple[int, int]:
    """(submission queues, completion queues), counted from 1."""
    return (value & 0xFFFF) + 1, (value >> 16 & 0xFFFF) + 1


AEC_NAMESPACE_CHANGED = 1 << 8
AEC_ANA_CHANGED = 1 << 11
AEC_DISCOVERY_CHANGED = 1 << 31
"""Bits of Asynchronous Event Configuration, the events that the host wants; and of OAES in Identify
Controller, the events that there are."""


EVENT_NOTICE = 2
"""The kind of the events below. Others are errors, health and vendor's."""
NOTICE_NAMESPACE_CHANGED = 0x00
NOTICE_ANA_CHANGED = 0x03
NOTICE_DISCOVERY_CHANGED = 0xF0
"""Information of an event of kind NOTICE."""


@dataclass(frozen=True, slots=True)
class AsyncEvent(Record):
    """Result of an Asynchronous Event Request; `log_page` is the one to read."""

    kind: Annotated[int, Bits(0, 3)]
    information: Annotated[int, Bits(1, 8)]
    log_page: Annotated[int, Bits(2, 8)]


NAMESPACE_CHANGED_EVENT = AsyncEvent(EVENT_NOTICE, NOTICE_NAMESPACE_CHANGED, 0x04)
ANA_CHANGED_EVENT = AsyncEvent(EVENT_NOTICE, NOTICE_ANA_CHANGED, 0x0C)
DISCOVERY_CHANGED_EVENT = AsyncEvent(EVENT_NOTICE, NOTICE_DISCOVERY_CHANGED, 0x70)
