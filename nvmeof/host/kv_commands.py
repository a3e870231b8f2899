"""Builders of the commands of the Key Value command set. Lengths are in bytes; `wire/kv.py` has the layout.

They run on the I/O queues like any other, over TCP and RDMA alike. A value moves between the caller's
buffers and the wire without a copy, as blocks do. Statuses that mean something here: KEY_NOT_FOUND (the
ordinary miss of Retrieve, Exist and Delete), KEY_EXISTS and KEY_NOT_FOUND of a conditional Store,
INVALID_KEY_SIZE, INVALID_VALUE_SIZE, CAPACITY_EXCEEDED.
"""

from collections.abc import Sequence

from nvmeof.host.command import Command
from nvmeof.host.commands import whole_bytes
from nvmeof.tcp.crc32c import Buffer
from nvmeof.wire.kv import KvOpcode, StoreOption, key_dwords


def _keyed(
    name: str,
    opcode: KvOpcode,
    nsid: int,
    key: bytes,
    size: int = 0,
    options: int = 0,
    *,
    data_in: memoryview | None = None,
    data_out: Sequence[Buffer] = (),
) -> Command:
    """ValueError for a key of more than 16 bytes."""
    cdw2, cdw3, cdw14, cdw15 = key_dwords(key)
    command = Command(
        name, opcode, nsid, size, len(key) | options << 8, 0, 0, cdw14, cdw15,
        data_in=data_in, data_out=data_out,
    )  # fmt: skip
    command.cdw2, command.cdw3 = cdw2, cdw3
    return command


def store(
    nsid: int, key: bytes, parts: Sequence[Buffer], *, options: StoreOption = StoreOption.NONE
) -> Command:
    """Store a value, `parts` one behind the other, under a key: all of it or nothing."""
    whole = whole_bytes(parts)
    size = sum(map(len, whole))
    return _keyed("store", KvOpcode.STORE, nsid, key, size, options, data_out=whole if size else ())


def retrieve(nsid: int, key: bytes, into: memoryview) -> Command:
    """Bring a value, or as much of its beginning as `into` holds.

    `result` is the length of the whole value; `into` has the first min(result, len(into)) bytes of it.
    """
    command = _keyed("retrieve", KvOpcode.RETRIEVE, nsid, key, len(into), data_in=into)
    command.result_is_length = True
    return command


def list_keys(nsid: int, first: bytes, into: memoryview) -> Command:
    """Keys from `first` on (itself, or what follows it; empty: from the beginning), as many as `into` holds.

    `wire.kv.decode_key_list_untrusted` reads them. `into` is cleared: a controller need not send its rest.
    """
    into[:] = bytes(len(into))
    command = _keyed("list", KvOpcode.LIST, nsid, first, len(into), data_in=into)
    command.may_be_short = True
    return command


def delete(nsid: int, key: bytes) -> Command:
    return _keyed("delete", KvOpcode.DELETE, nsid, key)


def exist(nsid: int, key: bytes) -> Command:
    """Ends with SUCCESS where the key exists, with KEY_NOT_FOUND where it does not."""
    return _keyed("exist", KvOpcode.EXIST, nsid, key)
