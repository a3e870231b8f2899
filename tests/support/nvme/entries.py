"""Submission queue entries as a host writes them: their SGL descriptors, and Fabrics commands."""

from __future__ import annotations

from nvmeof.wire.fabrics import CONNECT_DATA_BYTES, Authentication, Connect, FabricsType, PropertyAccess
from nvmeof.wire.sgl import (
    SUBTYPE_ADDRESS,
    SUBTYPE_INVALIDATE,
    SUBTYPE_OFFSET,
    SUBTYPE_TRANSPORT,
    SglDescriptor,
    SglKind,
)
from nvmeof.wire.sqe import DATASET_RANGE, SQE, AdminOpcode, DatasetRange, Sqe


def encode_entry(sqe: Sqe) -> bytes:
    """The 64 bytes of a command; a host packs its own in one go with the header of their capsule."""
    sgl = sqe.sgl
    high = (sgl.kind << 4 | sgl.subtype) << 56 | sgl.length
    if sgl.kind == SglKind.KEYED:
        high |= sgl.key << 24
    return SQE.pack(
        sqe.opcode, sqe.flags, sqe.cid, sqe.nsid, sqe.cdw2, sqe.cdw3, sqe.metadata_pointer, sgl.address, high,
        sqe.cdw10, sqe.cdw11, sqe.cdw12, sqe.cdw13, sqe.cdw14, sqe.cdw15,
    )  # fmt: skip


def encode_ranges(*ranges: DatasetRange) -> bytes:
    """The data of Dataset Management."""
    return b"".join(DATASET_RANGE.pack(each.attributes, each.blocks, each.slba) for each in ranges)


def in_capsule(length: int, offset: int = 0) -> SglDescriptor:
    """Data that travel in the command capsule, `offset` bytes into its data."""
    return SglDescriptor(offset, length, SglKind.DATA_BLOCK, SUBTYPE_OFFSET)


def transport(length: int) -> SglDescriptor:
    """Data that the transport moves by its own means (TCP: data PDUs); also "no data" with length 0."""
    return SglDescriptor(0, length, SglKind.TRANSPORT, SUBTYPE_TRANSPORT)


def keyed(address: int, length: int, key: int, *, invalidate: bool = False) -> SglDescriptor:
    """Data in registered memory of the host (RDMA). `length` is under 2^24."""
    subtype = SUBTYPE_INVALIDATE if invalidate else SUBTYPE_ADDRESS
    return SglDescriptor(address, length, SglKind.KEYED, subtype, key)


def fabrics_entry(
    fields: Connect | PropertyAccess | Authentication, cid: int = 0, sgl: SglDescriptor | None = None
) -> Sqe:
    """A Fabrics command; data to the controller are in the capsule unless `sgl` says otherwise."""
    match fields:
        case Connect():
            kind, place = FabricsType.CONNECT, in_capsule(CONNECT_DATA_BYTES)
        case PropertyAccess(value=None):
            kind, place = FabricsType.PROPERTY_GET, transport(0)
        case PropertyAccess():
            kind, place = FabricsType.PROPERTY_SET, transport(0)
        case Authentication(receive=True):
            kind, place = FabricsType.AUTHENTICATION_RECEIVE, transport(fields.length)
        case Authentication():
            kind, place = FabricsType.AUTHENTICATION_SEND, in_capsule(fields.length)
    return Sqe(AdminOpcode.FABRICS, cid, kind, place if sgl is None else sgl, *fields.dwords())
