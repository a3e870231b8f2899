"""Both sides of DH-HMAC-CHAP with every message in hand: all combinations, and all that may be wrong."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvmeof.authentication.controller_side import ControllerAuthentication, ControllerState
from nvmeof.authentication.host_side import HostAuthentication, HostState
from nvmeof.authentication.responses import Exchange
from nvmeof.authentication.secret import ALL_GROUPS, ALL_HASHES, Credentials, new_secret
from nvmeof.errors import AuthenticationFailed, LocalProtocolError, MalformedPdu
from nvmeof.limits import AUTHENTICATION_S
from nvmeof.wire.authentication import (
    Challenge,
    Failure,
    FailureReason,
    GroupId,
    HashId,
    Negotiate,
    Protocol,
    Reply,
    Success1,
    decode_controller_message_untrusted,
    decode_host_message_untrusted,
    transaction_of,
)
from tests.support.nvme.authentication import HOST, ROOM, SUBSYSTEM, Meddler, exchange

NULL, FFDHE2048 = GroupId.NULL, GroupId.FFDHE2048
HOST_SECRET, OWN_SECRET = new_secret(), new_secret()


def pair(
    *, both_ways: bool = True, hash_id: HashId = HashId.SHA256, group: GroupId = NULL
) -> tuple[Credentials, Credentials]:
    """The host's and the controller's credentials, which fit."""
    own = OWN_SECRET if both_ways else None
    return Credentials(HOST_SECRET, own), Credentials(HOST_SECRET, OWN_SECRET, (hash_id,), (group,))


def meddling(name: str, change: Any) -> Meddler:
    return lambda each, message: change(message) if each == name else message


# --- everything fits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("both_ways", [False, True], ids=["one-way", "both-ways"])
@pytest.mark.parametrize("group", [NULL, FFDHE2048, GroupId.FFDHE3072], ids=lambda each: each.name.lower())
@pytest.mark.parametrize("hash_id", HashId, ids=lambda each: each.name.lower())
def test_all_combinations(hash_id: HashId, group: GroupId, both_ways: bool) -> None:
    ours, theirs = pair(both_ways=both_ways, hash_id=hash_id, group=group)
    outcome = exchange(ours, theirs)
    assert outcome.both_are_content
    assert outcome.host.state is HostState.PROVEN
    assert ("success2" in outcome.sent) == both_ways
    challenge = decode_controller_message_untrusted(outcome.sent["challenge"])
    assert isinstance(challenge, Challenge)
    assert (challenge.hash_id, challenge.group_id) == (hash_id, group)
    assert outcome.controller.deadline == math.inf


@pytest.mark.parametrize(
    "group", [GroupId.FFDHE4096, GroupId.FFDHE6144, GroupId.FFDHE8192], ids=lambda each: each.name.lower()
)
def test_large_groups(group: GroupId) -> None:
    assert exchange(*pair(group=group, hash_id=HashId.SHA512)).both_are_content


def test_all_lengths_and_transformations_of_secrets() -> None:
    for length, transform in itertools.product((32, 48, 64), (None, *HashId)):
        host, own = new_secret(length, transform), new_secret(length, transform)
        assert exchange(Credentials(host, own), Credentials(host, own)).both_are_content


def test_the_controller_chooses_by_its_own_preference() -> None:
    theirs = Credentials(HOST_SECRET, None, (HashId.SHA384, HashId.SHA256), (FFDHE2048, NULL))
    outcome = exchange(Credentials(HOST_SECRET), theirs)
    challenge = decode_controller_message_untrusted(outcome.sent["challenge"])
    assert isinstance(challenge, Challenge)
    assert (challenge.hash_id, challenge.group_id) == (HashId.SHA384, FFDHE2048)


def test_no_two_exchanges_are_alike() -> None:
    ours, theirs = pair(group=FFDHE2048)
    seen = [exchange(ours, theirs).sent for _ in range(3)]
    for name in seen[0]:
        assert len({each[name] for each in seen}) == 3, name


# --- a wrong secret -------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [NULL, FFDHE2048], ids=lambda each: each.name.lower())
def test_a_host_with_a_wrong_secret(group: GroupId) -> None:
    _, theirs = pair(group=group)
    outcome = exchange(Credentials(new_secret(), OWN_SECRET), theirs)
    assert outcome.error is not None
    assert "does not accept the secret" in str(outcome.error)
    assert outcome.error.farewell is None
    assert outcome.controller.over
    assert outcome.controller.failure is not None
    assert "another secret" in outcome.controller.failure


def test_a_controller_with_a_wrong_secret() -> None:
    ours, _ = pair()
    outcome = exchange(ours, Credentials(HOST_SECRET, new_secret()))
    assert "could not prove itself" in str(outcome.error)
    assert outcome.controller.over
    assert outcome.controller.failure
    assert outcome.controller.failure is not None
    assert "does not accept our proof" in outcome.controller.failure


def test_a_controller_that_leaves_its_proof_out() -> None:
    ours, theirs = pair()
    outcome = exchange(
        ours,
        theirs,
        meddling("success1", lambda raw: Success1(int.from_bytes(raw[4:6], "little"), 32).encode()),
    )
    assert "could not prove itself" in str(outcome.error)


def test_a_controller_without_a_secret_of_its_own() -> None:
    ours, _ = pair()
    outcome = exchange(ours, Credentials(HOST_SECRET))
    assert "own is missing" in str(outcome.error)
    assert outcome.controller.over


def test_a_host_that_is_not_known() -> None:
    ours, _ = pair()
    outcome = exchange(ours, None)
    assert "not usable" in str(outcome.error)


@pytest.mark.parametrize(
    ("hashes", "groups", "said"),
    [((HashId.SHA512,), ALL_GROUPS, "hash unusable"), (ALL_HASHES, (FFDHE2048,), "group unusable")],
)
def test_nothing_in_common(hashes: Any, groups: Any, said: str) -> None:
    _, theirs = pair()
    outcome = exchange(Credentials(HOST_SECRET, OWN_SECRET, hashes, groups), theirs)
    assert said in str(outcome.error)


# --- meddled with ---------------------------------------------------------------------------------------


GROUPS = st.sampled_from([NULL, FFDHE2048])
NAMES = ("negotiate", "challenge", "reply", "success1", "success2")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [NULL, FFDHE2048], ids=lambda each: each.name.lower())
def test_every_truncation_fails(name: str, group: GroupId) -> None:
    """What the controller gives is padded with zeros, so a truncation there is a message of zeros."""
    ours, theirs = pair(group=group)
    whole = exchange(ours, theirs).sent[name]
    sizes = range(len(whole)) if len(whole) < 100 else (*range(0, 64), len(whole) - 1)
    for size in sizes:
        if not any(whole[size:]) and name in ("challenge", "success1"):
            continue  # zeros that padding restores
        outcome = exchange(ours, theirs, meddling(name, lambda raw, size=size: raw[:size]))
        if name == "success2":
            assert outcome.controller.failure
        elif name in ("challenge", "success1") and outcome.both_are_content:
            assert not any(outcome.sent[name][size:])  # random bytes that happened to be zeros
        else:
            assert not outcome.both_are_content


def _meaning(name: str, raw: bytes) -> object:
    decode = decode_controller_message_untrusted if name in ("challenge", "success1") else None
    return decode(raw) if decode else decode_host_message_untrusted(raw)


@settings(max_examples=200)
@given(
    st.sampled_from(NAMES), st.integers(0, 10_000), st.integers(1, 255), st.sampled_from([NULL, FFDHE2048])
)
def test_no_flipped_bit_is_believed(name: str, where: int, mask: int, group: GroupId) -> None:
    """A change in any message but the first that means something is noticed by one side at least, and no
    exception but the one comes out. (The first is not authenticated: what it offers can only be reduced to
    what both were configured to accept.)
    """
    ours, theirs = pair(group=group)
    changed: list[tuple[bytes, bytes]] = []

    def flip(raw: bytes) -> bytes:
        altered = bytearray(raw)
        altered[where % len(raw)] ^= mask
        changed.append((raw, bytes(altered)))
        return bytes(altered)

    outcome = exchange(ours, theirs, meddling(name, flip))
    before, after = changed[0]
    if name == "negotiate":
        assert outcome.error is not None or outcome.both_are_content
        return
    try:
        meant_the_same = _meaning(name, before) == _meaning(name, after.ljust(ROOM, b"\0")
            if name in ("challenge", "success1") else after)  # fmt: skip
    except MalformedPdu:
        meant_the_same = False
    assert outcome.both_are_content == meant_the_same


@given(st.binary(max_size=300), st.lists(st.booleans(), max_size=6))
def test_random_messages_never_authenticate(raw: bytes, steps: list[bool]) -> None:
    _, theirs = pair()
    controller = ControllerAuthentication(HOST, SUBSYSTEM, 0.0)
    for send in steps:
        if send:
            controller.receive(raw, theirs, 0.0)
        else:
            controller.give(ROOM)
    assert not controller.successes
    host = HostAuthentication(pair()[0], HOST, SUBSYSTEM)
    host.negotiate()
    with pytest.raises(AuthenticationFailed):
        host.challenged(raw)


def test_a_null_group_is_not_forced_on_a_controller_that_wants_one() -> None:
    """Somebody in between strikes the groups out of the offer."""
    ours, theirs = pair(group=FFDHE2048)
    offer = Protocol(ALL_HASHES, (NULL,))
    outcome = exchange(
        ours,
        theirs,
        meddling("negotiate", lambda raw: Negotiate(transaction_of(raw), (offer,)).encode()),
    )
    assert "group unusable" in str(outcome.error)


# --- replayed and reflected -----------------------------------------------------------------------------


@pytest.mark.parametrize("group", [NULL, FFDHE2048], ids=lambda each: each.name.lower())
@pytest.mark.parametrize("name", ["reply", "success1"])
def test_a_replayed_proof_is_worth_nothing(name: str, group: GroupId) -> None:
    ours, theirs = pair(group=group)
    old = exchange(ours, theirs).sent[name]
    ours.numbers._transaction -= 1  # the same transaction id once more
    outcome = exchange(ours, theirs, meddling(name, lambda raw: old))
    assert outcome.sent[name][4:6] == old[4:6]
    assert not outcome.both_are_content
    assert outcome.error is not None


def test_a_reply_to_an_old_sequence_number_is_worth_nothing() -> None:
    """The same challenge, transaction and secret, and the sequence number before."""
    ours, theirs = pair(both_ways=False)
    controller = ControllerAuthentication(HOST, SUBSYSTEM, 0.0)
    host = HostAuthentication(ours, HOST, SUBSYSTEM)
    controller.receive(host.negotiate(), theirs, 0.0)
    challenge = decode_controller_message_untrusted(controller.give(ROOM))
    assert isinstance(challenge, Challenge)
    agreed = Exchange(HashId.SHA256, challenge.transaction, HOST, SUBSYSTEM)
    old = agreed.host_response(HOST_SECRET, challenge.challenge, challenge.sequence - 1)
    controller.receive(Reply(challenge.transaction, old).encode(), theirs, 0.0)
    assert controller.state is ControllerState.FAILURE_DUE


def _with_sequence_0(raw: bytes) -> bytes:
    return raw[:12] + bytes(4) + raw[16:]


@pytest.mark.parametrize("name", ["challenge", "reply"])
def test_sequence_number_0_is_no_challenge(name: str) -> None:
    ours, theirs = pair()
    assert not exchange(ours, theirs, meddling(name, _with_sequence_0)).both_are_content


def test_a_host_challenged_with_its_own_challenge_answers_nothing_of_use() -> None:
    """An impostor without a secret has the host answer, in a second exchange, what the first one asks."""
    ours, _ = pair()
    first = HostAuthentication(ours, HOST, SUBSYSTEM)
    first.negotiate()
    transaction = first._transaction
    reply = decode_host_message_untrusted(
        first.challenged(Challenge(transaction, HashId.SHA256, NULL, 77, bytes(32)).encode())
    )
    assert isinstance(reply, Reply)
    assert reply.challenge is not None
    ours.numbers._transaction = transaction - 1 & 0xFFFF  # the best case for the impostor
    second = HostAuthentication(ours, HOST, SUBSYSTEM)
    second.negotiate()
    answer = decode_host_message_untrusted(
        second.challenged(
            Challenge(transaction, HashId.SHA256, NULL, reply.sequence, reply.challenge).encode()
        )
    )
    assert isinstance(answer, Reply)
    with pytest.raises(AuthenticationFailed, match="could not prove itself"):
        first.concluded(Success1(transaction, 32, answer.response).encode())


def test_a_controller_challenged_with_its_own_challenge_refuses() -> None:
    """Even by a host that has proven itself."""
    _, theirs = pair()
    controller = ControllerAuthentication(HOST, SUBSYSTEM, 0.0)
    host = HostAuthentication(pair()[0], HOST, SUBSYSTEM)
    controller.receive(host.negotiate(), theirs, 0.0)
    challenge = decode_controller_message_untrusted(controller.give(ROOM))
    assert isinstance(challenge, Challenge)
    agreed = Exchange(HashId.SHA256, challenge.transaction, HOST, SUBSYSTEM)
    response = agreed.host_response(HOST_SECRET, challenge.challenge, challenge.sequence)
    controller.receive(Reply(challenge.transaction, response, 9, challenge.challenge).encode(), theirs, 0.0)
    assert controller.state is ControllerState.FAILURE_DUE
    assert decode_controller_message_untrusted(controller.give(ROOM)) == Failure(
        challenge.transaction, FailureReason.INCORRECT_PAYLOAD, from_host=False
    )


# --- order, time and room -------------------------------------------------------------------------------


def test_a_host_that_was_proven_proves_itself_again() -> None:
    ours, theirs = pair()
    outcome = exchange(ours, theirs)
    again = exchange(ours, theirs, controller=outcome.controller, now=100.0)
    assert again.both_are_content
    assert again.controller.successes == 2
    failed = exchange(Credentials(new_secret()), theirs, controller=outcome.controller, now=200.0)
    assert failed.error is not None
    assert failed.controller.failure
    assert failed.controller.over


def test_messages_out_of_order_fail() -> None:
    ours, theirs = pair()
    sent = exchange(ours, theirs).sent
    for first, then in itertools.product(("negotiate", "reply", "success2", "failure2"), repeat=2):
        sent["failure2"] = Failure(transaction_of(sent["reply"]), 1, from_host=True).encode()
        controller = ControllerAuthentication(HOST, SUBSYSTEM, 0.0)
        controller.receive(sent[first], theirs, 0.0)
        controller.receive(sent[then], theirs, 0.0)
        assert controller.failure
        assert controller.state in (ControllerState.FAILURE_DUE, ControllerState.OVER), (first, then)
    nothing_due = ControllerAuthentication(HOST, SUBSYSTEM, 0.0)
    assert isinstance(decode_controller_message_untrusted(nothing_due.give(ROOM)), Failure)
    assert nothing_due.over


def test_a_host_object_serves_once() -> None:
    ours, theirs = pair()
    outcome = exchange(ours, theirs)
    for call in (
        outcome.host.negotiate,
        lambda: outcome.host.challenged(b""),
        lambda: outcome.host.concluded(b""),
    ):
        with pytest.raises(LocalProtocolError):
            call()


def test_too_little_room_fails() -> None:
    ours, theirs = pair()
    controller = ControllerAuthentication(HOST, SUBSYSTEM, 0.0)
    controller.receive(HostAuthentication(ours, HOST, SUBSYSTEM).negotiate(), theirs, 0.0)
    assert isinstance(decode_controller_message_untrusted(controller.give(47)), Failure)


def test_deadlines() -> None:
    ours, theirs = pair()
    controller = ControllerAuthentication(HOST, SUBSYSTEM, 10.0)
    assert controller.deadline == 10.0 + AUTHENTICATION_S
    controller.receive(HostAuthentication(ours, HOST, SUBSYSTEM).negotiate(), theirs, 20.0)
    assert controller.deadline == 10.0 + AUTHENTICATION_S, "no message gives more time"
    controller.expire()
    assert controller.over
    proven = exchange(ours, theirs).controller
    proven.receive(b"nonsense", theirs, 50.0)
    assert proven.deadline == 50.0 + AUTHENTICATION_S
    assert proven.failure


def test_a_secure_channel_is_not_offered() -> None:
    ours, theirs = pair()
    outcome = exchange(ours, theirs, meddling("negotiate", lambda raw: raw[:6] + b"\x01" + raw[7:]))
    assert "concatenation mismatch" in str(outcome.error)
