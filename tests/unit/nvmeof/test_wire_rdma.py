"""NVMe/RDMA records: bytes that the Linux kernel sent, every field with a value of its own, bad bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvmeof.errors import MalformedPdu
from nvmeof.wire import rdma
from nvmeof.wire.log_page import TransportType, decode_discovery_entry_untrusted
from nvmeof.wire.sgl import SglDescriptor
from nvmeof.wire.sqe import decode_sqe_untrusted
from nvmeof.wire.status import Status
from tests.support.nvme.entries import in_capsule, keyed, transport

U16 = st.integers(0, 0xFFFF)


@pytest.mark.parametrize(
    ("raw", "record"),
    [
        # Linux 6.1: nvme connect -t rdma, the admin queue and an I/O queue of 16.
        ("0000 0000 2000 1f00", rdma.ConnectRequest(0, 32, 32)),
        ("0000 0100 1000 0f00", rdma.ConnectRequest(1, 16, 16)),
        ("0000 2211 4433 6655 8877", rdma.ConnectRequest(0x1122, 0x3344, 0x5567, 0x7788)),
    ],
)
def test_request(raw: str, record: rdma.ConnectRequest) -> None:
    data = bytes.fromhex(raw).ljust(32, b"\0")
    assert rdma.decode_connect_request_untrusted(data) == record
    assert record.encode() == data
    assert rdma.decode_connect_request_untrusted(data + bytes(24)) == record


def test_accept_and_reject() -> None:
    data = bytes.fromhex("0000 2000").ljust(32, b"\0")  # Linux 6.1, nvmet
    assert rdma.decode_connect_accept_untrusted(data) == 32
    assert rdma.encode_connect_accept(32) == data
    for status in rdma.RejectStatus:
        reject = rdma.encode_connect_reject(status)
        assert reject == bytes([0, 0, status, 0])
        assert rdma.decode_connect_reject_untrusted(reject.ljust(148, b"\0")) == status
        assert rdma.describe_reject(status) == status.name.lower().replace("_", " ")
    assert rdma.describe_reject(99) == "status 99"


def test_what_a_request_that_is_wrong_is_answered_with() -> None:
    with pytest.raises(rdma.UnacceptableRequest) as caught:
        rdma.decode_connect_request_untrusted(bytes(31))
    assert caught.value.status is rdma.RejectStatus.INVALID_PRIVATE_DATA_LENGTH
    with pytest.raises(rdma.UnacceptableRequest) as caught:
        rdma.decode_connect_request_untrusted(b"\1".ljust(32, b"\0"))
    assert caught.value.status is rdma.RejectStatus.INVALID_RECORD_FORMAT


@given(st.binary(max_size=64))
def test_random_bytes_raise_one_exception(data: bytes) -> None:
    for decode in (
        rdma.decode_connect_request_untrusted,
        rdma.decode_connect_accept_untrusted,
        rdma.decode_connect_reject_untrusted,
    ):
        try:
            record = decode(data)
        except MalformedPdu:
            continue
        assert record.encode()[:4] == data[:4]


def test_an_address_as_linux_lists_it() -> None:
    raw = bytearray(1024)
    raw[:32] = bytes.fromhex("010102040100ffff2000").ljust(32, b"\0")
    raw[32:64] = b"4421".ljust(32, b"\0")
    raw[256:261] = b"nqn.t"
    raw[512:524] = b"192.168.77.1"
    raw[768:771] = b"\1\1\1"
    entry = decode_discovery_entry_untrusted(raw)
    assert entry.transport_type == TransportType.RDMA
    assert (entry.address, entry.service, entry.subsystem_nqn) == ("192.168.77.1", "4421", "nqn.t")
    assert entry.tsas[:3] == b"\1\1\1"
    assert bytes.fromhex("0104010000000000 0000").ljust(256, b"\0") == rdma.RDMA_ADDRESS


def test_keyed_descriptors_of_the_kernel() -> None:
    """An 8 KiB write (with invalidation) and a Flush, out of a capture of Linux 6.1."""
    write = decode_sqe_untrusted(
        bytes.fromhex(
            "01400610010000000000000000000000000000000000000000a07d83fd9e1cff"
            "002000474400004f40000000000000000f000000000000000000000000000000"
        )
    )
    assert write.sgl == keyed(0xFF1C9EFD837DA000, 8192, 0x4447, invalidate=True)
    assert rdma.wrong_sgl(write.sgl, 8192, 0, from_host=True) == 0
    flush = decode_sqe_untrusted(
        bytes.fromhex("00400600010000000000000000000000000000000000000000000000000000000000000000000040")
        + bytes(24)
    )
    assert flush.sgl == keyed(0, 0, 0)
    assert rdma.is_keyed(flush.sgl)


@pytest.mark.parametrize(
    ("sgl", "capsule_data", "from_host", "status"),
    [
        (in_capsule(512), 512, True, 0),
        (in_capsule(512, 16), 528, True, 0),
        (in_capsule(512, 17), 528, True, Status.SGL_OFFSET_INVALID),
        (in_capsule(512, (1 << 64) - 512), 528, True, Status.SGL_OFFSET_INVALID),
        (in_capsule(511), 512, True, Status.DATA_SGL_LENGTH_INVALID),
        (in_capsule(512), 512, False, Status.SGL_TYPE_INVALID),
        (keyed(0, 512, 1), 0, False, 0),
        (keyed(0, 511, 1), 0, False, Status.DATA_SGL_LENGTH_INVALID),
        (transport(512), 0, True, Status.SGL_TYPE_INVALID),
        (SglDescriptor(0, 512, 4, 3), 0, True, Status.SGL_TYPE_INVALID),
        (SglDescriptor(0, 512, 3, 1), 0, True, Status.SGL_TYPE_INVALID),
    ],
)
def test_which_descriptors_fit(sgl: SglDescriptor, capsule_data: int, from_host: bool, status: int) -> None:
    assert rdma.wrong_sgl(sgl, 512, capsule_data, from_host=from_host) == status
