"""Status codes, in one table. Read `cqe.py` for where they travel.

A status here is eleven bits: status code type (SCT) << 8 | status code (SC), as in NVMe Base 2.0 figures
94 to 101 and NVMe-oF 1.1 figure 11. Do Not Retry, More and the retry delay are separate fields of the CQE.
"""

from enum import IntEnum


class Status(IntEnum):
    """SCT << 8 | SC, without those of commands that neither role speaks (firmware, namespace management,
    protection information, sanitize, fused commands, queues in memory)."""

    # Generic (SCT 0)
    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    COMMAND_ID_CONFLICT = 0x003
    DATA_TRANSFER_ERROR = 0x004
    ABORTED_POWER_LOSS = 0x005
    INTERNAL_ERROR = 0x006
    ABORT_REQUESTED = 0x007
    ABORTED_SQ_DELETION = 0x008
    INVALID_NAMESPACE = 0x00B
    COMMAND_SEQUENCE_ERROR = 0x00C
    INVALID_SGL_SEGMENT = 0x00D
    INVALID_SGL_COUNT = 0x00E
    DATA_SGL_LENGTH_INVALID = 0x00F
    SGL_TYPE_INVALID = 0x011
    ATOMIC_WRITE_UNIT_EXCEEDED = 0x014
    OPERATION_DENIED = 0x015
    SGL_OFFSET_INVALID = 0x016
    HOST_ID_INCONSISTENT = 0x018
    KEEP_ALIVE_EXPIRED = 0x019
    KEEP_ALIVE_INVALID = 0x01A
    SGL_GRANULARITY_INVALID = 0x01E
    NAMESPACE_WRITE_PROTECTED = 0x020
    COMMAND_INTERRUPTED = 0x021
    TRANSIENT_TRANSPORT_ERROR = 0x022
    PROHIBITED_BY_LOCKDOWN = 0x023
    ADMIN_MEDIA_NOT_READY = 0x024
    LBA_OUT_OF_RANGE = 0x080
    CAPACITY_EXCEEDED = 0x081
    NAMESPACE_NOT_READY = 0x082
    RESERVATION_CONFLICT = 0x083
    FORMAT_IN_PROGRESS = 0x084
    INVALID_VALUE_SIZE = 0x085
    INVALID_KEY_SIZE = 0x086
    KEY_NOT_FOUND = 0x087
    UNRECOVERED_ERROR = 0x088
    KEY_EXISTS = 0x089

    # Command specific (SCT 1)
    INVALID_QUEUE_ID = 0x101
    ABORT_LIMIT_EXCEEDED = 0x103
    AER_LIMIT_EXCEEDED = 0x105
    INVALID_LOG_PAGE = 0x109
    FEATURE_NOT_SAVEABLE = 0x10D
    FEATURE_NOT_CHANGEABLE = 0x10E
    IO_COMMAND_SET_NOT_SUPPORTED = 0x129
    IO_COMMAND_SET_NOT_ENABLED = 0x12A
    IO_COMMAND_SET_COMBINATION_REJECTED = 0x12B
    INVALID_IO_COMMAND_SET = 0x12C
    # Command specific, I/O commands
    CONFLICTING_ATTRIBUTES = 0x180
    WRITE_TO_READ_ONLY_RANGE = 0x182
    COMMAND_SIZE_LIMIT_EXCEEDED = 0x183
    # The same numbers mean something else for Fabrics commands, hence names of their own in
    # FabricsStatus below.

    # Media and data integrity (SCT 2)
    WRITE_FAULT = 0x280
    UNRECOVERED_READ_ERROR = 0x281
    COMPARE_FAILURE = 0x285
    ACCESS_DENIED = 0x286
    DEALLOCATED_BLOCK = 0x287

    # Path related (SCT 3)
    INTERNAL_PATH_ERROR = 0x300
    ANA_PERSISTENT_LOSS = 0x301
    ANA_INACCESSIBLE = 0x302
    ANA_TRANSITION = 0x303
    CONTROLLER_PATHING_ERROR = 0x360
    HOST_PATHING_ERROR = 0x370
    HOST_ABORTED = 0x371


class FabricsStatus(IntEnum):
    """Command-specific status of Fabrics commands (SCT 1): the same codes as some I/O commands use."""

    CONNECT_INCOMPATIBLE_FORMAT = 0x180
    CONNECT_CONTROLLER_BUSY = 0x181
    CONNECT_INVALID_PARAMETERS = 0x182
    CONNECT_RESTART_DISCOVERY = 0x183
    CONNECT_INVALID_HOST = 0x184
    DISCONNECT_INVALID_QUEUE_TYPE = 0x185
    DISCOVERY_RESTART = 0x190
    AUTHENTICATION_REQUIRED = 0x191


def describe(status: int, *, fabrics: bool = False) -> str:
    """A status for a log line: its name in plain words and its number."""
    try:
        name = (FabricsStatus(status) if fabrics else Status(status)).name
    except ValueError:
        if fabrics:
            return describe(status)
        if status == FabricsStatus.AUTHENTICATION_REQUIRED:
            return describe(status, fabrics=True)  # which any command may be answered with
        kinds = ("generic", "command specific", "media", "path", "reserved", "reserved", "reserved", "vendor")
        name = f"{kinds[status >> 8 & 7]} status"
    return f"{name.lower().replace('_', ' ')} ({status:#05x})"
