"""A client with a valid key that attacks the door with bodies in chunks, over real connections.

    .venv/bin/python -m pytest tests/system/s3/test_s3_attack.py

G35_ATTACKS is how many connections it makes.
"""

from __future__ import annotations

import os
import random
import socket
import struct
from collections import Counter

import pytest

from agent.s3.chunked import SIGNED, SIGNED_TRAILER, UNSIGNED_TRAILER
from tests.support.engines.chunked_bodies import chunked_body, crc32_of
from tests.support.engines.s3_served import OTHER_KEY, Served, answer_of, signed_head
from tests.support.waiting import wait_until
from tests.unit.s3.test_s3_chunk_attack import data_of, wronged

ATTACKS = int(os.environ.get("G35_ATTACKS", "250"))
RESET = struct.pack("ii", 1, 0)
LENGTHS = ("-1", "+5", "0", "1e3", "9" * 15, "9" * 16, "99999999999999999999", "5, 5", "", " ", "0x5", "\xb2")
"""Of the data, as the client announces it."""


def attack(chance: random.Random, s3: Served) -> tuple[str, bytes | None]:
    """One connection: how it ended, and the object's bytes where they may be there now."""
    payload, parts = chance.choice((SIGNED, SIGNED_TRAILER, UNSIGNED_TRAILER)), data_of(chance)
    data = b"".join(parts)
    trailer = {} if payload == SIGNED else {"x-amz-checksum-crc32": crc32_of(data)}
    if trailer and chance.random() < 0.2:
        trailer = {"x-amz-checksum-crc32": crc32_of(data + b"x")}
    headers = {"x-amz-decoded-content-length": str(len(data)), "content-encoding": "aws-chunked"}
    if trailer:
        headers["x-amz-trailer"] = "x-amz-checksum-crc32"
    if chance.random() < 0.1:
        headers["x-amz-decoded-content-length"] = chance.choice(LENGTHS)
    in_http_chunks = chance.random() < 0.2
    if in_http_chunks:
        headers["transfer-encoding"] = "chunked"
    else:
        size = len(chunked_body(signed_head("PUT", "/blocks/a", headers, payload)[1], parts, trailer))
        headers["content-length"] = str(max(0, size + chance.choice((0, 0, 0, 0, -1, 1, 1000))))
    if chance.random() < 0.3:
        headers["expect"] = "100-continue"
    head, signer = signed_head("PUT", "/blocks/a", headers, payload)
    sent = chunked_body(signer, parts, trailer)
    if chance.random() < 0.7:
        sent = wronged(chance, sent)
    if in_http_chunks:
        sent = f"{len(sent):x}\r\n".encode() + sent + b"\r\n0\r\n\r\n"
        if chance.random() < 0.3:
            sent = wronged(chance, sent)
    if chance.random() < 0.3:
        sent += signed_head("GET", "/blocks")[0] * chance.choice((1, 30))
    whole = head + sent
    with s3.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        at, most = 0, chance.choice((1, 50, 5000, 1 << 20)) if len(whole) < 3000 else 1 << 14
        end = chance.choice((len(whole), len(whole), len(whole), chance.randrange(len(whole))))
        try:
            while at < end:
                count = chance.randint(1, most)
                connection.sendall(whole[at : min(end, at + count)])
                at += count
            match chance.randrange(3):
                case 0:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    return "reset", data
                case 1:
                    return "closed", data
            connection.shutdown(socket.SHUT_WR)
            status = 100
            while status == 100:
                status, _ = answer_of(connection)
        except OSError:
            return "hung up on", data
    return str(status), data


@pytest.mark.timeout(1800)
def test_bodies_that_mean_harm_leave_what_was_signed_or_nothing(s3: Served, seed: int) -> None:
    ends: Counter[str] = Counter()
    client, other = s3.client(), s3.client(OTHER_KEY)
    possible = set[bytes]()
    for number in range(ATTACKS):
        end, data = attack(random.Random(f"{seed} {number}"), s3)
        ends[end] += 1
        possible.add(data or b"")
        if not number % 50:
            other.put_object(Bucket="blocks", Key="b", Body=b"%d" % number)
            assert other.get_object(Bucket="blocks", Key="b")["Body"].read() == b"%d" % number
    print(f"seed {seed}: {dict(ends)}")
    client.close()
    other.close()
    wait_until(lambda: s3.door.counters.connections == 0, 30, "every connection to end")
    client = s3.client()
    listed = client.list_objects_v2(Bucket="blocks").get("Contents", [])
    if listed:
        stored = client.get_object(Bucket="blocks", Key="a")["Body"].read()
        # Of an unsigned body nobody can say more than that its checksum is right.
        assert crc32_of(stored) in {crc32_of(each) for each in possible}
    client.delete_object(Bucket="blocks", Key="a")
    client.close()
    wait_until(lambda: not s3.stores["one"].index.spare(9), what="what was written to be freed")
    wait_until(lambda: not s3.blocks["one"].blocks)
    assert not s3.door.counters.refusals["InternalError"]
    assert not {"100", "500"} & set(ends)
