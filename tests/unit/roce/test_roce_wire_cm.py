"""Management datagrams and the connection manager's messages: every field, truncation and refusal."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.roce.wire import cm_messages as cm
from emulator.roce.wire.cm_ip import (
    IP_CM_BYTES,
    IpCmHeader,
    PortSpace,
    decode_ip_cm_untrusted,
    port_of,
    service_id,
)
from emulator.roce.wire.cm_messages import NO_PATH, CmPath, RejectReason, reject_reason
from emulator.roce.wire.mad import DATA_BYTES, MAD_BYTES, Attribute, ManagementDatagram, decode_mad_untrusted
from emulator.roce.wire.malformed import Cause, MalformedPacket

LOCAL_GID, REMOTE_GID = bytes(range(0x10, 0x20)), bytes(range(0x20, 0x30))
PATH = CmPath(
    LOCAL_GID, REMOTE_GID, 0x1122, 0x3344, flow_label=0xABCDE, packet_rate=0x2A, traffic_class=0x55,
    hop_limit=0x66, service_level=0x9, subnet_local=True, local_ack_timeout=0x15,
)  # fmt: skip
PATH_HEX = f"1122 3344 {LOCAL_GID.hex()} {REMOTE_GID.hex()} abcde02a 55 66 98 a8"
OTHER = replace(PATH, flow_label=0x12345, local_ack_timeout=0x0A)
OTHER_HEX = f"1122 3344 {LOCAL_GID.hex()} {REMOTE_GID.hex()} 1234502a 55 66 98 50"


def private(size: int) -> bytes:
    return bytes(1 + i % 255 for i in range(size))


VECTORS: list[tuple[cm.CmMessage, str]] = [
    (
        cm.ConnectRequest(
            local_id=0x01020304, service_id=0x1112131415161718, ca_guid=0x2122232425262728, q_key=0x31323334,
            queue_pair=0x414243, responder_resources=0x44, local_eecn=0x515253, initiator_depth=0x54,
            remote_eecn=0x616263, remote_response_timeout=0x12, transport_type=2,
            end_to_end_flow_control=True,
            starting_psn=0x717273, local_response_timeout=0x11, retry_count=5, p_key=0x8182, path_mtu=4,
            rdc_exists=True, rnr_retry_count=6, max_cm_retries=0xE, srq=True, extended_transport_type=3,
            primary=PATH, alternate=OTHER, private_data=private(92),
        ),
        "01020304 00000000 1112131415161718 2122232425262728 00000000 31323334 414243 44 515253 54"
        f"616263 95 717273 8d 8182 4e eb {PATH_HEX} {OTHER_HEX} {private(92).hex()}",
    ),
    (
        cm.MessageReceipt(0x01020304, 0x05060708, cm.MessageKind.OTHER, 0x1A, private(222)),
        f"01020304 05060708 80 d0 {private(222).hex()}",
    ),
    (
        cm.ConnectReject(
            0x01020304, 0x05060708, cm.MessageKind.REP, RejectReason.CONSUMER_DEFINED, private(72),
            private(148),
        ),
        f"01020304 05060708 40 90 001c {private(72).hex()} {private(148).hex()}",
    ),
    (
        cm.ConnectReply(
            local_id=0x01020304, remote_id=0x05060708, q_key=0x11121314, queue_pair=0x212223, eecn=0x313233,
            starting_psn=0x414243, responder_resources=0x51, initiator_depth=0x52, target_ack_delay=0x13,
            failover_accepted=2, end_to_end_flow_control=True, rnr_retry_count=5, srq=True,
            ca_guid=0x6162636465666768, private_data=private(196),
        ),
        "01020304 05060708 11121314 21222300 31323300 41424300 51 52 9d b0 6162636465666768"
        f"{private(196).hex()}",
    ),
    (cm.ReadyToUse(0x01020304, 0x05060708, private(224)), f"01020304 05060708 {private(224).hex()}"),
    (
        cm.DisconnectRequest(0x01020304, 0x05060708, 0x111213, private(220)),
        f"01020304 05060708 11121300 {private(220).hex()}",
    ),
    (cm.DisconnectReply(0x01020304, 0x05060708, private(224)), f"01020304 05060708 {private(224).hex()}"),
    (
        cm.ServiceRequest(0x01020304, 0x1112131415161718, 0x8182, private(216)),
        f"01020304 8182 0000 1112131415161718 {private(216).hex()}",
    ),
    (
        cm.ServiceReply(
            0x01020304, cm.SidrStatus.REJECTED, 0x111213, 0x2122232425262728, 0x31323334, private(72),
            private(136),
        ),
        f"01020304 02 48 0000 11121300 2122232425262728 31323334 {private(72).hex()} {private(136).hex()}",
    ),
]  # fmt: skip
ATTRIBUTES = [0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]
MESSAGES = [message for message, _ in VECTORS]


def named(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize(
    ("message", "vector", "attribute"),
    [(*pair, attribute) for pair, attribute in zip(VECTORS, ATTRIBUTES, strict=True)],
    ids=[named(message) for message in MESSAGES],
)
def test_every_field_of_every_message(message: cm.CmMessage, vector: str, attribute: int) -> None:
    data = bytes.fromhex(vector)
    assert len(data) == DATA_BYTES
    head = f"01070203 0000 0000 a1a2a3a4a5a6a7a8 {attribute:04x} 0000 00000000"
    raw = cm.encode_cm(message, 0xA1A2A3A4A5A6A7A8)
    assert raw == bytes.fromhex(head) + data
    assert cm.decode_cm_untrusted(raw) == (message, 0xA1A2A3A4A5A6A7A8)
    assert cm.decode_cm_untrusted(memoryview(raw)) == (message, 0xA1A2A3A4A5A6A7A8)
    assert cm.attribute_of(message) == attribute
    assert len(message.private_data) == cm.PRIVATE_BYTES[Attribute(attribute)]
    assert all(getattr(message, field.name) for field in fields(message))


@pytest.mark.parametrize("message", MESSAGES, ids=named)
def test_no_other_length_is_a_datagram(message: cm.CmMessage) -> None:
    raw = cm.encode_cm(message, 1)
    for wrong in (*(raw[:length] for length in range(MAD_BYTES)), raw + b"\0"):
        with pytest.raises(MalformedPacket) as caught:
            cm.decode_cm_untrusted(wrong)
        assert caught.value.cause is Cause.MAD_LENGTH


@pytest.mark.parametrize(("offset", "value"), [(0, 2), (1, 1), (1, 3), (2, 1), (3, 0x81), (3, 1)])
def test_another_class_version_or_method(offset: int, value: int) -> None:
    raw = bytearray(cm.encode_cm(MESSAGES[0], 1))
    raw[offset] = value
    with pytest.raises(MalformedPacket) as caught:
        cm.decode_cm_untrusted(raw)
    assert caught.value.cause is Cause.MAD_CLASS


@pytest.mark.parametrize("attribute", [0, 0x01, 0x0F, Attribute.LAP, Attribute.APR, 0xFFFF])
def test_messages_that_are_not_understood(attribute: int) -> None:
    raw = ManagementDatagram(attribute, 7, bytes(DATA_BYTES)).encode()
    with pytest.raises(MalformedPacket) as caught:
        cm.decode_cm_untrusted(raw)
    assert caught.value.cause is Cause.CM_ATTRIBUTE


def test_the_header_of_a_datagram() -> None:
    datagram = ManagementDatagram(0x1112, 0x2122232425262728, private(232), 0x3132, 0x4142, 0x51525354)
    raw = datagram.encode()
    assert raw[:24].hex() == "010702033132414221222324252627281112000051525354"
    assert decode_mad_untrusted(raw) == datagram
    with pytest.raises(ValueError, match="232"):
        replace(datagram, data=b"").encode()


@pytest.mark.parametrize("message", MESSAGES, ids=named)
def test_private_data_are_filled_up_and_bounded(message: cm.CmMessage) -> None:
    size = cm.PRIVATE_BYTES[cm.attribute_of(message)]
    short, _ = cm.decode_cm_untrusted(cm.encode_cm(replace(message, private_data=b"few"), 1))
    assert short.private_data == b"few".ljust(size, b"\0")
    with pytest.raises(ValueError, match="private data"):
        cm.encode_cm(replace(message, private_data=bytes(size + 1)), 1)


@pytest.mark.parametrize(
    ("index", "wrong"),
    [
        (0, {"queue_pair": 1 << 24}), (0, {"starting_psn": 1 << 24}), (0, {"starting_psn": -1}),
        (0, {"responder_resources": 256}), (0, {"initiator_depth": 256}), (0, {"retry_count": 8}),
        (0, {"rnr_retry_count": 8}), (0, {"remote_response_timeout": 32}),
        (0, {"local_response_timeout": 32}),
        (0, {"max_cm_retries": 16}), (0, {"transport_type": 4}), (0, {"path_mtu": 16}),
        (0, {"extended_transport_type": 8}), (0, {"local_eecn": 1 << 24}), (0, {"remote_eecn": 1 << 24}),
        (0, {"local_id": 1 << 32}), (0, {"service_id": 1 << 64}), (0, {"p_key": 1 << 16}),
        (0, {"primary": replace(PATH, flow_label=1 << 20)}), (0, {"primary": replace(PATH, local_gid=b"")}),
        (0, {"alternate": replace(PATH, packet_rate=64)}),
        (0, {"alternate": replace(PATH, service_level=16)}),
        (0, {"primary": replace(PATH, local_ack_timeout=32)}), (0, {"primary": replace(PATH, hop_limit=256)}),
        (1, {"message": 4}), (1, {"service_timeout": 32}),
        (2, {"message": 4}), (2, {"reason": 1 << 16}), (2, {"information": bytes(73)}),
        (3, {"queue_pair": 1 << 24}), (3, {"eecn": 1 << 24}), (3, {"starting_psn": 1 << 24}),
        (3, {"target_ack_delay": 32}), (3, {"failover_accepted": 4}), (3, {"rnr_retry_count": 8}),
        (3, {"responder_resources": 256}), (3, {"ca_guid": 1 << 64}),
        (4, {"remote_id": -1}), (5, {"remote_queue_pair": 1 << 24}), (6, {"local_id": 1 << 32}),
        (7, {"p_key": 1 << 16}), (8, {"queue_pair": 1 << 24}), (8, {"information": bytes(73)}),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_refused(index: int, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        cm.encode_cm(replace(MESSAGES[index], **wrong), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        cm.encode_cm(MESSAGES[index], 1 << 64)


def test_reject_reasons() -> None:
    assert [reason.value for reason in RejectReason] == [*range(1, 34), 35]
    assert reject_reason(28) is RejectReason.CONSUMER_DEFINED
    assert reject_reason(34) == 34
    unknown = cm.ConnectReject(1, 2, 0, 4711)
    decoded, _ = cm.decode_cm_untrusted(cm.encode_cm(unknown, 1))
    assert isinstance(decoded, cm.ConnectReject)
    assert decoded.reason == 4711


def test_more_information_than_the_field_has_is_the_whole_field() -> None:
    """Seven bits of length count to 127; the field has 72 bytes, and nothing beyond it is read."""
    raw = bytearray(cm.encode_cm(MESSAGES[2], 1))
    raw[24 + 9] = 127 << 1
    decoded, _ = cm.decode_cm_untrusted(raw)
    assert isinstance(decoded, cm.ConnectReject)
    assert decoded.information == private(72)


def test_no_path_is_all_zero() -> None:
    assert NO_PATH.encode() == bytes(44)


@given(
    st.binary(min_size=DATA_BYTES, max_size=DATA_BYTES),
    st.sampled_from(ATTRIBUTES),
    st.integers(0, (1 << 64) - 1),
)
def test_any_data_is_a_message_that_encodes_to_itself(data: bytes, attribute: int, transaction: int) -> None:
    """Up to reserved bits: what is decoded, encoded and decoded again stays the same."""
    raw = ManagementDatagram(attribute, transaction, data).encode()
    message, echoed = cm.decode_cm_untrusted(raw)
    assert echoed == transaction
    assert cm.decode_cm_untrusted(cm.encode_cm(message, transaction)) == (message, transaction)


# --- the RDMA IP CM service ------------------------------


def test_service_ids() -> None:
    assert service_id(PortSpace.TCP, 4420) == 0x0000_0000_0106_1144
    assert service_id(PortSpace.UDP, 1) == 0x0000_0000_0111_0001
    assert port_of(0x0000_0000_0106_1144) == (PortSpace.TCP, 4420)
    assert port_of(0x0100_0000_0106_1144) is None
    assert port_of(0) is None
    for wrong in (-1, 65536):
        with pytest.raises(ValueError, match="no port"):
            service_id(PortSpace.TCP, wrong)


def test_the_ip_header_in_private_data() -> None:
    four = IpCmHeader(b"\x01\x02\x03\x04", b"\x05\x06\x07\x08", 0x1112, minor_version=3)
    assert four.encode().hex() == "03401112" + "00" * 12 + "01020304" + "00" * 12 + "05060708"
    assert decode_ip_cm_untrusted(four.encode() + b"consumer") == four
    six = IpCmHeader(LOCAL_GID, REMOTE_GID, 0x1112)
    assert six.encode() == bytes.fromhex("00601112") + LOCAL_GID + REMOTE_GID
    assert decode_ip_cm_untrusted(six.encode()) == six
    for wrong in (replace(four, source=LOCAL_GID), replace(four, source=b"", destination=b"")):
        with pytest.raises(ValueError, match="addresses"):
            wrong.encode()


def test_private_data_without_the_ip_header() -> None:
    good = IpCmHeader(b"\x01\x02\x03\x04", b"\x05\x06\x07\x08", 0x1112).encode()
    for length in range(IP_CM_BYTES):
        with pytest.raises(MalformedPacket) as caught:
            decode_ip_cm_untrusted(good[:length])
        assert caught.value.cause is Cause.IP_CM
    for offset, value in ((0, 0x10), (1, 0x00), (1, 0x50), (1, 0xF0)):
        with pytest.raises(MalformedPacket) as caught:
            decode_ip_cm_untrusted(good[:offset] + bytes([value]) + good[offset + 1 :])
        assert caught.value.cause is Cause.IP_CM
