"""Messages of in-band authentication: what Authentication Send and Receive carry (`fabrics.Authentication`).

NVMe Base 2.0, in-band authentication (TP8006); all numbers little-endian. Every message begins alike:

    0 AUTH_TYPE u8 (0 common, 1 DH-HMAC-CHAP), 1 AUTH_ID u8, 2 reserved u16, 4 T_ID u16

and goes on with

    AUTH_Negotiate         6 SC_C u8, 7 NAPD u8, 8 NAPD descriptors of 64 bytes each: 0 AUTHID u8 (1),
                           2 HALEN u8, 3 DHLEN u8, 4 hash ids (30 bytes), 34 DH group ids (30 bytes)
    DH-HMAC-CHAP_Challenge 6 HL u8, 8 HASHID u8, 9 DHGID u8, 10 DHVLEN u16, 12 SEQNUM u32,
                           16 challenge (HL bytes), DH value (DHVLEN bytes)
    DH-HMAC-CHAP_Reply     6 HL u8, 8 CVALID u8, 10 DHVLEN u16, 12 SEQNUM u32,
                           16 response (HL), challenge (HL, zeros without CVALID), DH value (DHVLEN)
    DH-HMAC-CHAP_Success1  6 HL u8, 8 RVALID u8, 16 response (HL bytes)
    DH-HMAC-CHAP_Success2  16 bytes, the rest reserved
    AUTH_Failure1, 2       6 reason code u8 (1), 7 reason code explanation u8

A host sends a message with exactly its length. What it receives is padded with zeros to the length that it
asked for, so those decoders look at the beginning only.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from nvmeof.errors import MalformedPdu, exactly

SECURITY_PROTOCOL = 0xE9
"""SECP of these messages; SPSP0 and SPSP1 are 01h."""
PROTOCOL_SPECIFIC = 1

HEADER = struct.Struct("<BBHH")
NEGOTIATE = struct.Struct("<BBHHBB")
DESCRIPTOR = struct.Struct("<BxBB30s30s")
CHALLENGE = struct.Struct("<BBHHBxBBHI")
REPLY = struct.Struct("<BBHHBxBxHI")
SUCCESS1 = struct.Struct("<BBHHBxB7x")
SUCCESS2 = struct.Struct("<BBHH10x")
FAILURE = struct.Struct("<BBHHBB")
assert (HEADER.size, NEGOTIATE.size, DESCRIPTOR.size) == (6, 8, 64)
assert (CHALLENGE.size, REPLY.size, SUCCESS1.size, SUCCESS2.size, FAILURE.size) == (16, 16, 16, 16, 8)

MAX_MESSAGE_BYTES = 4096
"""A Reply with SHA-512 and an 8192-bit DH value has 1,168 bytes; Linux transfers 4,096 as well."""

MAX_IDS = 30
"""Places for hash ids, and for DH group ids, in one descriptor."""

AUTHENTICATION_FAILED = 1
"""The only reason code; the explanation says more."""


class AuthType(IntEnum):
    COMMON = 0x00
    DHCHAP = 0x01


class MessageId(IntEnum):
    """AUTH_ID. NEGOTIATE and the failures are common messages, the others are DH-HMAC-CHAP's."""

    NEGOTIATE = 0x00
    CHALLENGE = 0x01
    REPLY = 0x02
    SUCCESS1 = 0x03
    SUCCESS2 = 0x04
    FAILURE2 = 0xF0
    FAILURE1 = 0xF1


class HashId(IntEnum):
    """HASHID: the hash of challenges, responses and session keys."""

    SHA256 = 1
    SHA384 = 2
    SHA512 = 3


class GroupId(IntEnum):
    """DHGID: the finite-field Diffie-Hellman group (RFC 7919), or none."""

    NULL = 0
    FFDHE2048 = 1
    FFDHE3072 = 2
    FFDHE4096 = 3
    FFDHE6144 = 4
    FFDHE8192 = 5


class FailureReason(IntEnum):
    """The explanation in AUTH_Failure1 and AUTH_Failure2."""

    FAILED = 1
    NOT_USABLE = 2
    CONCATENATION_MISMATCH = 3
    HASH_UNUSABLE = 4
    GROUP_UNUSABLE = 5
    INCORRECT_PAYLOAD = 6
    INCORRECT_MESSAGE = 7


def describe_reason(reason: int) -> str:
    """An explanation code in plain words."""
    try:
        return FailureReason(reason).name.lower().replace("_", " ")
    except ValueError:
        return f"reason {reason:#04x}"


@dataclass(frozen=True, slots=True)
class Protocol:
    """A descriptor of AUTH_Negotiate: hashes and DH groups that the host can do, by their numbers."""

    hashes: tuple[int, ...]
    groups: tuple[int, ...]
    authid: int = AuthType.DHCHAP

    def encode(self) -> bytes:
        return DESCRIPTOR.pack(
            self.authid, len(self.hashes), len(self.groups), bytes(self.hashes), bytes(self.groups)
        )


@dataclass(frozen=True, slots=True)
class Negotiate:
    """AUTH_Negotiate, the host's first message. `concatenation` (SC_C) asks for TLS on top; 0 does not."""

    transaction: int
    protocols: tuple[Protocol, ...]
    concatenation: int = 0

    def encode(self) -> bytes:
        head = NEGOTIATE.pack(
            AuthType.COMMON, MessageId.NEGOTIATE, 0, self.transaction, self.concatenation, len(self.protocols)
        )
        return head + b"".join(protocol.encode() for protocol in self.protocols)


@dataclass(frozen=True, slots=True)
class Challenge:
    """DH-HMAC-CHAP_Challenge: the controller's choice of hash and group, and its challenge."""

    transaction: int
    hash_id: int
    group_id: int
    sequence: int
    challenge: bytes
    dh_value: bytes = b""

    def encode(self) -> bytes:
        head = CHALLENGE.pack(
            AuthType.DHCHAP, MessageId.CHALLENGE, 0, self.transaction,
            len(self.challenge), self.hash_id, self.group_id, len(self.dh_value), self.sequence,
        )  # fmt: skip
        return head + self.challenge + self.dh_value


@dataclass(frozen=True, slots=True)
class Reply:
    """DH-HMAC-CHAP_Reply. `challenge` is None where the host does not ask the controller to prove itself."""

    transaction: int
    response: bytes
    sequence: int = 0
    challenge: bytes | None = None
    dh_value: bytes = b""

    def encode(self) -> bytes:
        """16 bytes, the response, the challenge or as many zeros, the DH value."""
        length = len(self.response)
        head = REPLY.pack(
            AuthType.DHCHAP, MessageId.REPLY, 0, self.transaction,
            length, self.challenge is not None, len(self.dh_value), self.sequence,
        )  # fmt: skip
        return head + self.response + (self.challenge or bytes(length)) + self.dh_value


@dataclass(frozen=True, slots=True)
class Success1:
    """DH-HMAC-CHAP_Success1: the host is who it says. `response` answers its challenge, if there was one.

    `hash_bytes` is HL, which Linux wants to see without a response too.
    """

    transaction: int
    hash_bytes: int
    response: bytes | None = None

    def encode(self) -> bytes:
        head = SUCCESS1.pack(
            AuthType.DHCHAP, MessageId.SUCCESS1, 0, self.transaction,
            self.hash_bytes, self.response is not None,
        )  # fmt: skip
        return head + (self.response or bytes(self.hash_bytes))


@dataclass(frozen=True, slots=True)
class Success2:
    """DH-HMAC-CHAP_Success2: the controller is who it says, too."""

    transaction: int

    def encode(self) -> bytes:
        return SUCCESS2.pack(AuthType.DHCHAP, MessageId.SUCCESS2, 0, self.transaction)


@dataclass(frozen=True, slots=True)
class Failure:
    """AUTH_Failure1 (`from_host` False) or AUTH_Failure2 (True)."""

    transaction: int
    reason: int
    from_host: bool
    code: int = AUTHENTICATION_FAILED

    def encode(self) -> bytes:
        name = MessageId.FAILURE2 if self.from_host else MessageId.FAILURE1
        return FAILURE.pack(AuthType.COMMON, name, 0, self.transaction, self.code, self.reason)


HostMessage: TypeAlias = Negotiate | Reply | Success2 | Failure
ControllerMessage: TypeAlias = Challenge | Success1 | Failure
Bytes: TypeAlias = bytes | bytearray | memoryview


def _head(data: Bytes, layout: struct.Struct, name: str) -> tuple[int, ...]:
    if len(data) < layout.size:
        raise MalformedPdu(f"{name} of {len(data)} bytes")
    return layout.unpack_from(data)


def transaction_of(data: Bytes) -> int:
    """T_ID of whatever message this is; 0 where it is too short to have one."""
    return HEADER.unpack_from(data)[3] if len(data) >= HEADER.size else 0


def decode_host_message_untrusted(data: Bytes) -> HostMessage:
    """What a host has sent, which has exactly the length of its message."""
    kind, name, _, transaction = _head(data, HEADER, "an authentication message")
    match kind, name:
        case AuthType.COMMON, MessageId.NEGOTIATE:
            return _negotiate(data)
        case AuthType.DHCHAP, MessageId.REPLY:
            return _reply(data)
        case AuthType.DHCHAP, MessageId.SUCCESS2:
            exactly(data, SUCCESS2.size, "Success2")
            return Success2(transaction)
        case _, MessageId.FAILURE2:
            return _failure(data, from_host=True)
    raise MalformedPdu(f"authentication message {name:#04x} of type {kind} is not a host's")


def decode_controller_message_untrusted(data: Bytes) -> ControllerMessage:
    """What a host has received: a message, and zeros behind it."""
    kind, name, _, _ = _head(data, HEADER, "an authentication message")
    match kind, name:
        case AuthType.DHCHAP, MessageId.CHALLENGE:
            return _challenge(data)
        case AuthType.DHCHAP, MessageId.SUCCESS1:
            return _success1(data)
        case _, MessageId.FAILURE1:
            return _failure(data[: FAILURE.size], from_host=False)
    raise MalformedPdu(f"authentication message {name:#04x} of type {kind} is not a controller's")


def _negotiate(data: Bytes) -> Negotiate:
    _, _, _, transaction, concatenation, count = _head(data, NEGOTIATE, "AUTH_Negotiate")
    exactly(data, NEGOTIATE.size + count * DESCRIPTOR.size, f"AUTH_Negotiate of {count} protocols")
    protocols = []
    for authid, hash_count, group_count, hashes, groups in DESCRIPTOR.iter_unpack(data[NEGOTIATE.size :]):
        if authid != AuthType.DHCHAP:
            # Of a protocol that we do not know, so neither is the rest of its descriptor.
            protocols.append(Protocol((), (), authid))
            continue
        if hash_count > MAX_IDS or group_count > MAX_IDS:
            raise MalformedPdu(f"{hash_count} hashes and {group_count} groups in {MAX_IDS} places")
        protocols.append(Protocol(tuple(hashes[:hash_count]), tuple(groups[:group_count]), authid))
    return Negotiate(transaction, tuple(protocols), concatenation)


def _challenge(data: Bytes) -> Challenge:
    _, _, _, transaction, length, hash_id, group_id, dh_bytes, sequence = _head(data, CHALLENGE, "Challenge")
    middle, end = CHALLENGE.size + length, CHALLENGE.size + length + dh_bytes
    if len(data) < end:
        raise MalformedPdu(f"Challenge of {len(data)} bytes, not {end}")
    challenge, dh_value = bytes(data[CHALLENGE.size : middle]), bytes(data[middle:end])
    return Challenge(transaction, hash_id, group_id, sequence, challenge, dh_value)


def _reply(data: Bytes) -> Reply:
    _, _, _, transaction, length, valid, dh_bytes, sequence = _head(data, REPLY, "Reply")
    first = REPLY.size + length
    second = first + length
    exactly(data, second + dh_bytes, "Reply")
    if valid > 1:
        raise MalformedPdu(f"CVALID is {valid}")
    challenge = bytes(data[first:second]) if valid else None
    return Reply(transaction, bytes(data[REPLY.size : first]), sequence, challenge, bytes(data[second:]))


def _success1(data: Bytes) -> Success1:
    _, _, _, transaction, length, valid = _head(data, SUCCESS1, "Success1")
    if valid > 1:
        raise MalformedPdu(f"RVALID is {valid}")
    end = SUCCESS1.size + length
    if valid and len(data) < end:
        raise MalformedPdu(f"Success1 of {len(data)} bytes, not {end}")
    return Success1(transaction, length, bytes(data[SUCCESS1.size : end]) if valid else None)


def _failure(data: Bytes, *, from_host: bool) -> Failure:
    exactly(data, FAILURE.size, "an authentication failure")
    _, _, _, transaction, code, reason = FAILURE.unpack(data)
    return Failure(transaction, reason, from_host, code)
