"""Features and asynchronous events (NVMe Base 2.0, 5.27 and 5.2).

Set Features  CDW10 7:0 FID, 31 SV (save)          CDW11 the value
Get Features  CDW10 7:0 FID, 10:8 SEL              CDW11 by feature
result        the value (Number of Queues: what was granted)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


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
    TIMESTAMP = 0x0E
    KEEP_ALIVE_TIMER = 0x0F
    HOST_BEHAVIOR = 0x16
    COMMAND_SET_PROFILE = 0x19
    HOST_ID = 0x81
    RESERVATION_MASK = 0x82
    NAMESPACE_WRITE_PROTECT = 0x84


FEATURE_SAVE = 1 << 31


@dataclass(frozen=True, slots=True)
class QueueCount:
    """Value and result of Number of Queues. Counted from 1 here; the wire is 0's based."""

    submission: int
    completion: int

    def encode(self) -> int:
        """The 32-bit value; counts of 1 to 65535."""
        return self.submission - 1 | self.completion - 1 << 16


def decode_queue_count(value: int) -> QueueCount:
    """Counts of a 32-bit value or result."""
    return QueueCount((value & 0xFFFF) + 1, (value >> 16 & 0xFFFF) + 1)


AEC_NAMESPACE_CHANGED = 1 << 8
AEC_ANA_CHANGED = 1 << 11
AEC_DISCOVERY_CHANGED = 1 << 31
"""Bits of Asynchronous Event Configuration: which events the host wants."""


class EventKind(IntEnum):
    """Type of an asynchronous event."""

    ERROR = 0
    HEALTH = 1
    NOTICE = 2
    IMMEDIATE = 3
    COMMAND_SET = 6
    VENDOR = 7


NOTICE_NAMESPACE_CHANGED = 0x00
NOTICE_ANA_CHANGED = 0x03
NOTICE_DISCOVERY_CHANGED = 0xF0
"""Information of an event of kind NOTICE."""


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """Result of an Asynchronous Event Request: 2:0 kind, 15:8 information, 23:16 the log page to read."""

    kind: int
    information: int
    log_page: int

    def encode(self) -> int:
        """The 32-bit result."""
        return self.kind | self.information << 8 | self.log_page << 16


def decode_async_event(result: int) -> AsyncEvent:
    """An event of the result of an Asynchronous Event Request."""
    return AsyncEvent(result & 7, result >> 8 & 0xFF, result >> 16 & 0xFF)


NAMESPACE_CHANGED_EVENT = AsyncEvent(EventKind.NOTICE, NOTICE_NAMESPACE_CHANGED, 0x04)
ANA_CHANGED_EVENT = AsyncEvent(EventKind.NOTICE, NOTICE_ANA_CHANGED, 0x0C)
DISCOVERY_CHANGED_EVENT = AsyncEvent(EventKind.NOTICE, NOTICE_DISCOVERY_CHANGED, 0x70)
