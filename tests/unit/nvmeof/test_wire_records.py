"""Wire records: every field survives, sizes are the specification's, and bad bytes raise one exception."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvmeof.errors import MalformedPdu
from nvmeof.wire import cqe, fabrics, features, identify, log_page, properties, sgl, sqe
from nvmeof.wire.status import FabricsStatus, Status, describe
from tests.support.nvme.entries import (
    encode_entry,
    encode_ranges,
    fabrics_entry,
    in_capsule,
    keyed,
    transport,
)

U8 = st.integers(0, 0xFF)
U16 = st.integers(0, 0xFFFF)
U32 = st.integers(0, 0xFFFF_FFFF)
U64 = st.integers(0, (1 << 64) - 1)
BOOL = st.booleans()
NQN = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=55)

SGLS = st.one_of(
    st.builds(in_capsule, U32, U32),
    st.builds(transport, U32),
    st.builds(keyed, U64, st.integers(0, 0xFFFFFF), U32, invalidate=BOOL),
)
SQES = st.builds(sqe.Sqe, U8, U16, U32, SGLS, *[U32] * 6, cdw2=U32, cdw3=U32, metadata_pointer=U64, flags=U8)
CQES = st.builds(cqe.Cqe, U16, st.integers(0, 0x7FF), U64, U16, U16, BOOL)


@given(SQES)
def test_sqe(entry: sqe.Sqe) -> None:
    assert len(encode_entry(entry)) == 64
    assert sqe.decode_sqe_untrusted(encode_entry(entry)) == entry


@given(CQES)
def test_cqe(entry: cqe.Cqe) -> None:
    assert len(entry.encode()) == 16
    assert cqe.decode_cqe_untrusted(entry.encode()) == entry


@given(SGLS)
def test_sgl(descriptor: sgl.SglDescriptor) -> None:
    assert sqe.decode_sqe_untrusted(encode_entry(sqe.Sqe(2, sgl=descriptor))).sgl == descriptor


def test_sqe_golden() -> None:
    """Every field non-zero, each with a value of its own, laid out by hand after figure 86."""
    raw = bytes.fromhex(
        "02 41 2211 66554433 aa998877 eeddccbb 0807060504030201"
        "1817161514131211 00100000 000000 01"
        "23222120 27262524 2b2a2928 2f2e2d2c 33323130 37363534"
    )
    entry = sqe.decode_sqe_untrusted(raw)
    assert entry == sqe.Sqe(
        opcode=sqe.IoOpcode.READ,
        flags=0x41,
        cid=0x1122,
        nsid=0x33445566,
        cdw2=0x778899AA,
        cdw3=0xBBCCDDEE,
        metadata_pointer=0x0102030405060708,
        sgl=in_capsule(0x1000, 0x1112131415161718),
        cdw10=0x20212223,
        cdw11=0x24252627,
        cdw12=0x28292A2B,
        cdw13=0x2C2D2E2F,
        cdw14=0x30313233,
        cdw15=0x34353637,
    )
    assert encode_entry(entry) == raw
    assert entry.slba == 0x2425262720212223
    assert entry.blocks == 0x2A2B + 1
    assert entry.sgl.in_capsule


def test_cqe_golden() -> None:
    raw = bytes.fromhex("0807060504030201 2211 4433 6655 0bf5")
    entry = cqe.decode_cqe_untrusted(raw)
    assert entry == cqe.Cqe(
        cid=0x5566,
        status=0x285,
        result=0x0102030405060708,
        sqhd=0x1122,
        sqid=0x3344,
        do_not_retry=True,
    )
    assert entry.status == Status.COMPARE_FAILURE
    assert entry.encode() == raw[:14] + bytes.fromhex("0a85"), "without phase, retry delay and More"


def test_sgl_golden() -> None:
    def encoded(descriptor: sgl.SglDescriptor) -> str:
        return encode_entry(sqe.Sqe(2, sgl=descriptor))[24:40].hex()

    memory = keyed(0x1122334455667788, 0xABCDEF, 0x01020304, invalidate=True)
    assert encoded(memory) == "8877665544332211" + "efcdab" + "04030201" + "4f"
    assert encoded(transport(0x1000)) == "00" * 8 + "00100000" + "000000" + "5a"
    assert encoded(in_capsule(1024)) == "00" * 8 + "00040000" + "000000" + "01"


@given(st.lists(st.builds(sqe.DatasetRange, U64, U32, U32), min_size=1, max_size=256))
def test_dataset_ranges(ranges: list[sqe.DatasetRange]) -> None:
    assert sqe.decode_dataset_ranges_untrusted(encode_ranges(*ranges)) == ranges


@given(U16, U16, U32, U8, U16, U16)
def test_connect(qid: int, sqsize: int, kato: int, cattr: int, recfmt: int, cid: int) -> None:
    fields = fabrics.Connect(qid, sqsize, kato, cattr, recfmt)
    entry = fabrics_entry(fields, cid)
    assert (entry.opcode, entry.fctype, entry.cid) == (0x7F, 1, cid)
    assert fabrics.Connect.of(sqe.decode_sqe_untrusted(encode_entry(entry))) == fields
    raw = encode_entry(entry)
    assert struct.unpack_from("<HHHBxI", raw, 40) == (recfmt, qid, sqsize, cattr, kato)


@given(st.binary(min_size=16, max_size=16), U16, NQN, NQN)
def test_connect_data(host_id: bytes, cntlid: int, subsystem: str, host: str) -> None:
    data = fabrics.ConnectData(host_id, cntlid, subsystem, host)
    raw = data.encode()
    assert len(raw) == 1024
    assert raw[256:].startswith(subsystem.encode())
    assert raw[512:].startswith(host.encode())
    assert fabrics.decode_connect_data_untrusted(raw) == data


def test_connect_data_refuses_names_without_end_and_other_alphabets() -> None:
    good = fabrics.ConnectData(bytes(16), 1, "nqn.a", "nqn.b").encode()
    for start in (256, 512):
        for raw in (b"x" * 256, b"\xff\xfe\0".ljust(256, b"\0"), b"x" * 224 + bytes(32)):
            with pytest.raises(MalformedPdu):
                fabrics.decode_connect_data_untrusted(good[:start] + raw + good[start + 256 :])


@given(U32, st.sampled_from([4, 8]), st.one_of(st.none(), U64))
def test_property_access(offset: int, size: int, value: int | None) -> None:
    if value is not None and size == 4:
        value &= 0xFFFF_FFFF
    access = fabrics.PropertyAccess(offset, size, value)
    entry = sqe.decode_sqe_untrusted(encode_entry(fabrics_entry(access, 7)))
    assert fabrics.decode_property_access(entry) == access
    assert entry.fctype == (fabrics.FabricsType.PROPERTY_GET if value is None else 0)


@given(BOOL, U32, U8, U8, U8)
def test_authentication(receive: bool, length: int, secp: int, spsp0: int, spsp1: int) -> None:
    fields = fabrics.Authentication(receive, length, secp, spsp0, spsp1)
    raw = encode_entry(fabrics_entry(fields))
    assert fabrics.decode_authentication(sqe.decode_sqe_untrusted(raw)) == fields
    assert raw[41:48] == bytes((spsp0, spsp1, secp)) + length.to_bytes(4, "little")


def test_nqn_limits() -> None:
    assert len(fabrics.encode_nqn("n" * 223)) == 223
    for bad in ("", "n" * 224, "a\0b"):
        with pytest.raises(ValueError):
            fabrics.encode_nqn(bad)


# --- Identify -----------------------------------------------------------------

ASCII = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)


def distinct_controller() -> identify.IdentifyController:
    """Every field non-zero and different from its neighbours."""
    values: dict[str, Any] = {}
    for index, field in enumerate(dataclasses.fields(identify.IdentifyController), start=1):
        if isinstance(field.default, str):
            values[field.name] = field.name.upper()[:8]
        else:
            values[field.name] = index
    return identify.IdentifyController(**values)


def test_identify_controller() -> None:
    controller = distinct_controller()
    raw = controller.encode()
    assert len(raw) == 4096
    assert identify.decode_identify_controller_untrusted(raw) == controller
    # Spot checks against the figure, so that encoder and decoder are not wrong together.
    assert raw[4:24] == b"SERIAL".ljust(20)
    assert raw[77] == controller.mdts
    assert int.from_bytes(raw[78:80], "little") == controller.cntlid
    assert int.from_bytes(raw[92:96], "little") == controller.oaes
    assert raw[111] == controller.cntrltype
    assert int.from_bytes(raw[320:322], "little") == controller.kas
    assert raw[512] == controller.sqes
    assert int.from_bytes(raw[514:516], "little") == controller.maxcmd
    assert int.from_bytes(raw[516:520], "little") == controller.nn
    assert int.from_bytes(raw[520:522], "little") == controller.oncs
    assert int.from_bytes(raw[536:540], "little") == controller.sgls
    assert raw[768:774] == b"SUBNQN"
    assert int.from_bytes(raw[1792:1796], "little") == controller.ioccsz
    assert int.from_bytes(raw[1796:1800], "little") == controller.iorcsz
    assert raw[1803] == controller.msdbd


def test_identify_namespace() -> None:
    values: dict[str, Any] = {}
    for index, field in enumerate(dataclasses.fields(identify.IdentifyNamespace), start=1):
        if field.name != "formats":
            values[field.name] = (
                bytes([index]) * len(field.default) if isinstance(field.default, bytes) else index
            )
    values["flbas"] = 1
    formats = (identify.LbaFormat(9, 8, 2), identify.LbaFormat(12, 0, 1))
    namespace = identify.IdentifyNamespace(**values, formats=formats)
    raw = namespace.encode()
    assert len(raw) == 4096
    assert identify.decode_identify_namespace_untrusted(raw) == namespace
    assert namespace.lba_bytes == 4096
    assert raw[25] == 1
    assert raw[104:120] == namespace.nguid
    assert raw[120:128] == namespace.eui64
    assert raw[128:136] == bytes((8, 0, 9, 2, 0, 0, 12, 1))


def test_identify_namespace_refuses_a_format_out_of_its_list() -> None:
    raw = bytearray(identify.IdentifyNamespace().encode())
    raw[26] = 1
    with pytest.raises(MalformedPdu):
        identify.decode_identify_namespace_untrusted(raw)
    raw[26], raw[25] = 0, 64
    with pytest.raises(MalformedPdu):
        identify.decode_identify_namespace_untrusted(raw)
    assert identify.decode_identify_namespace_untrusted(bytes(4096)).nsze == 0


@given(st.sets(st.integers(1, 0xFFFF_FFFE), max_size=1024))
def test_namespace_list(ids: set[int]) -> None:
    assert identify.decode_namespace_list_untrusted(identify.encode_namespace_list(ids)) == sorted(ids)


def test_namespace_list_ascends() -> None:
    with pytest.raises(MalformedPdu):
        identify.decode_namespace_list_untrusted(struct.pack("<2I", 5, 4).ljust(4096, b"\0"))


OPTIONAL_16 = st.one_of(st.none(), st.binary(min_size=16, max_size=16))


@given(
    st.builds(
        identify.NamespaceDescriptors,
        OPTIONAL_16,
        st.one_of(st.none(), st.binary(min_size=8, max_size=8)),
        OPTIONAL_16,
        st.one_of(st.none(), st.integers(0, 2)),
    )
)
def test_namespace_descriptors(names: identify.NamespaceDescriptors) -> None:
    raw = names.encode()
    assert len(raw) == 4096
    assert identify.decode_namespace_descriptors_untrusted(raw) == names


def test_namespace_descriptors_skip_the_unknown_and_refuse_the_wrong() -> None:
    nguid = bytes(range(16))
    raw = (b"\x99\x03\0\0abc" + b"\x02\x10\0\0" + nguid).ljust(4096, b"\0")
    assert identify.decode_namespace_descriptors_untrusted(raw).nguid == nguid
    for bad in (b"\x02\x08\0\0" + bytes(8), b"\x99\xff\0\0" + b"\x01" * 255 + b"\x99\xff\0\0" * 1000):
        with pytest.raises(MalformedPdu):
            identify.decode_namespace_descriptors_untrusted(bad.ljust(4096, b"\0")[:4096])


def test_command_set_structures() -> None:
    assert identify.encode_nvm_controller(4)[:16] == b"\0\0\0\4".ljust(16, b"\0")
    independent = identify.encode_independent_namespace(2, 5)
    assert independent[:15] == bytes.fromhex("00020000 05000000 00000000 000001")
    assert identify.encode_command_sets(1, 3)[:16] == struct.pack("<2Q", 1, 3)
    for made in (identify.encode_nvm_controller(4), independent, identify.encode_command_sets(1)):
        assert len(made) == 4096


# --- log pages, features, properties ----------------------------------------------


def test_log_page_request() -> None:
    request = log_page.LogPageRequest(0x70, 4 * 0x12345, 0x1_2345_6788, True, 5, 0x11)
    d10, d11, d12, d13, d14, _ = request.dwords()
    entry = sqe.Sqe(2, cdw10=d10, cdw11=d11, cdw12=d12, cdw13=d13, cdw14=d14)
    assert log_page.LogPageRequest.of(entry) == request


def test_error_entry() -> None:
    raw = log_page.ErrorEntry(1, 2, 3, 4, 6, 7, 9).encode()
    assert len(raw) == 64
    assert struct.unpack_from("<QHHHHQIBB", raw) == (1, 2, 3, 4 << 1, 0xFFFF, 6, 7, 0, 9)


def test_smart_log() -> None:
    raw = log_page.encode_smart_log(298, 16)
    assert len(raw) == 512
    assert struct.unpack_from("<BHB", raw) == (0, 298, 100)
    assert int.from_bytes(raw[176:192], "little") == 16


@given(st.sets(st.integers(1, 0xFFFF_FFFE), max_size=1030))
def test_changed_namespaces(ids: set[int]) -> None:
    expected = sorted(ids) if len(ids) <= 1024 else [0xFFFF_FFFF]
    raw = log_page.encode_changed_namespaces(ids)
    assert [nsid for (nsid,) in struct.iter_unpack("<I", raw) if nsid] == expected


def test_command_effects() -> None:
    raw = log_page.encode_command_effects({0x06: 1, 0xFF: 9}, {0x01: 3})
    found = {opcode: value for opcode, (value,) in enumerate(struct.iter_unpack("<I", raw)) if value}
    assert found == {0x06: 1, 0xFF: 9, 256 + 0x01: 3}
    assert len(raw) == 4096


def test_discovery_log() -> None:
    entries = tuple(
        log_page.DiscoveryEntry(
            f"192.0.2.{n}", "4420", f"nqn.2026-01.io.g35:{n}", 3, 1, 2, n, bytes([n]) * 256
        )
        for n in range(1, 4)
    )
    log = log_page.DiscoveryLog(77, entries)
    raw = log.encode()
    assert len(raw) == 4096
    assert log_page.decode_discovery_log_untrusted(raw) == log
    assert raw[1024:1036] == bytes.fromhex("03010200 0100 ffff 2000 0000")
    assert raw[1024 + 32 : 1024 + 36] == b"4420"
    assert raw[1024 + 512 : 1024 + 523] == b"192.0.2.1  "
    with pytest.raises(MalformedPdu, match="cut short"):
        log_page.decode_discovery_log_untrusted(raw[:-1024])
    for offset, value in ((8, 0xFF), (16, 1)):
        bad = bytearray(raw)
        bad[offset + 1 if offset == 8 else offset] = value
        with pytest.raises(MalformedPdu):
            log_page.decode_discovery_log_untrusted(bad)


@given(st.integers(1, 65535), st.integers(1, 65535))
def test_queue_count(submission: int, completion: int) -> None:
    value = features.encode_queue_count(submission, completion)
    assert features.decode_queue_count(value) == (submission, completion)


@given(st.integers(0, 7), U8, U8)
def test_async_event(kind: int, information: int, page: int) -> None:
    event = features.AsyncEvent(kind, information, page)
    assert features.AsyncEvent.of_number(event.to_number()) == event


def test_properties() -> None:
    capabilities = properties.Capabilities(1023, 15, 0x41, 1)
    assert properties.Capabilities.of_number(capabilities.to_number()) == capabilities
    assert capabilities.to_number() == 1023 | 1 << 16 | 15 << 24 | 0x41 << 37 | 1 << 48
    configuration = properties.Configuration(True, 1, 6, 3, 2, 6, 4)
    assert properties.Configuration.of_number(configuration.to_number()) == configuration
    status = properties.ControllerStatus(True, True, 2)
    assert properties.ControllerStatus.of_number(status.to_number()) == status
    # What Linux writes to enable a controller.
    assert properties.Configuration.of_number(0x0046_0001).sq_entry_size == 6
    assert properties.Configuration.of_number(0x0046_0001).enable


# --- bad bytes ----------------------------------------------------------------------

DECODERS: list[tuple[Callable[[bytes], object], int]] = [
    (sqe.decode_sqe_untrusted, 64),
    (sqe.decode_dataset_ranges_untrusted, 32),
    (cqe.decode_cqe_untrusted, 16),
    (fabrics.decode_connect_data_untrusted, 1024),
    (identify.decode_identify_controller_untrusted, 4096),
    (identify.decode_identify_namespace_untrusted, 4096),
    (identify.decode_namespace_list_untrusted, 4096),
    (identify.decode_namespace_descriptors_untrusted, 4096),
    (log_page.decode_discovery_log_untrusted, 2048),
    (log_page.decode_discovery_entry_untrusted, 1024),
]


@pytest.mark.parametrize(("decode", "size"), DECODERS, ids=lambda value: getattr(value, "__name__", ""))
@given(data=st.data())
def test_only_malformed_pdu(decode: Callable[[bytes], object], size: int, data: st.DataObject) -> None:
    """Noise of any length, also of the right one, decodes or raises `MalformedPdu`; never anything else."""
    length = data.draw(st.sampled_from([0, 1, size - 1, size, size + 1]))
    seed = data.draw(st.binary(max_size=64))
    raw = (seed * (length // max(len(seed), 1) + 1))[:length].ljust(length, b"\0")
    with contextlib.suppress(MalformedPdu):
        decode(raw)


def test_status_names() -> None:
    assert describe(Status.COMPARE_FAILURE) == "compare failure (0x285)"
    assert "invalid host" in describe(FabricsStatus.CONNECT_INVALID_HOST, fabrics=True)
    assert "lba out of range" in describe(0x080, fabrics=True)
    assert describe(0x7FE) == "vendor status (0x7fe)"
