"""Builders of commands that a host may send and the agent does not. Read `nvmeof/host/commands.py` first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nvmeof.host.command import Command
from nvmeof.tcp.crc32c import Buffer
from nvmeof.wire.fabrics import FabricsType
from nvmeof.wire.features import Feature
from nvmeof.wire.sqe import (
    DATASET_DEALLOCATE,
    DATASET_RANGE,
    WRITE_ZEROES_DEALLOCATE,
    AdminOpcode,
    DatasetRange,
    IoOpcode,
)
from tests.support.nvme.entries import encode_ranges


def compare(nsid: int, slba: int, blocks: int, parts: Sequence[Buffer]) -> Command:
    """Ends with status COMPARE_FAILURE where the blocks differ from `parts`."""
    return Command("compare", IoOpcode.COMPARE, nsid, slba, 0, blocks - 1, data_out=[bytes(p) for p in parts])


def write_zeroes(nsid: int, slba: int, blocks: int, *, deallocate: bool = False) -> Command:
    word = blocks - 1 | (WRITE_ZEROES_DEALLOCATE if deallocate else 0)
    return Command("write zeroes", IoOpcode.WRITE_ZEROES, nsid, slba, 0, word)


def dataset_management(nsid: int, ranges: Iterable[DatasetRange], *, deallocate: bool = True) -> Command:
    data = encode_ranges(*ranges)
    count, attributes = len(data) // DATASET_RANGE.size, DATASET_DEALLOCATE if deallocate else 0
    opcode = IoOpcode.DATASET_MANAGEMENT
    return Command("dataset management", opcode, nsid, count - 1, attributes, data_out=(data,))


def get_features(feature: Feature) -> Command:
    return Command("get feature", AdminOpcode.GET_FEATURES, 0, feature)


def disconnect() -> Command:
    return Command("disconnect", AdminOpcode.FABRICS, FabricsType.DISCONNECT)
