"""Bodies in chunks by a client with a valid key that means harm: sizes, signatures, trailers, every split.

    .venv/bin/python -m tests.unit.s3.test_s3_chunk_attack 100000

plays that many cases of the seed in G35_SEED.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import trio

from agent.inline.secrets import SecretKey
from agent.s3.body import Body
from agent.s3.chunked import (
    CHUNK_BYTES_MIN,
    LINE_BYTES_MAX,
    SIGNED,
    SIGNED_TRAILER,
    TRAILER_BYTES_MAX,
    UNSIGNED_TRAILER,
    ChunkDecoder,
)
from agent.s3.credentials import AccessKey
from agent.s3.errors import S3Error
from agent.s3.signature import Signer
from tests.support.engines.chunked_bodies import chunked_body, crc32_of

KEY = AccessKey("G35TESTONE", SecretKey(b"the secret of the first tenant"), "one")
WORDS = (SIGNED, SIGNED_TRAILER, UNSIGNED_TRAILER)
CASES = 1500
SIZES = (0, 1, 2, 5, 16, 100, CHUNK_BYTES_MIN - 1, CHUNK_BYTES_MIN, CHUNK_BYTES_MIN + 1, 20_000)
NUMBERS = (
    b"-1", b"+5", b"0x5", b" 5", b"5 ", b"", b"00000000000005", b"ffffffffffff", b"7fffffffffffffff",
    b"fffffffffffffffffff", b"5_0", b"\xb2", b"5;", b"5;chunk-signature=", b"5;x=y", b"0;0", b"1e3",
)  # fmt: skip
TRAILERS = (
    b"x-amz-checksum-crc32:AAAAAA==\r\n", b"X-AMZ-CHECKSUM-CRC32: AAAAAA==\r\n", b":\r\n", b"a\r\n",
    b"a:\r\n",
    b"a:b\r\na:b\r\n", b" a:b\r\n", b"a :b\r\n", b"a:\x00\r\n", b"a:\xff\r\n", b"content-length:5\r\n",
    b"x-amz-trailer-signature:" + b"0" * 64 + b"\r\n", b"x-amz-trailer-signature:\r\n" * 2,
    b"a:" + b" " * LINE_BYTES_MAX + b"\r\n", b"a:b\r\n" * TRAILER_BYTES_MAX, b"a:b\n", b"a:b\r", b"\r\n\r\n",
)  # fmt: skip


def signer_of(payload: str) -> Signer:
    return Signer(KEY, payload, "20130524T000000Z", "20130524/x/s3/aws4_request", "0" * 64, KEY.secret)


def data_of(chance: random.Random) -> list[bytes]:
    """Chunks that a client may send, and some that are too short."""
    count = chance.choice((0, 1, 1, 2, 3))
    least = CHUNK_BYTES_MIN if chance.random() < 0.9 else 1
    sizes = [max(least, chance.choice(SIZES)) for _ in range(count)]
    return [chance.randbytes(size) for size in (*sizes, chance.choice(SIZES))]


def wronged(chance: random.Random, body: bytes) -> bytes:
    """The body with one or two things wrong."""
    wrong = bytearray(body)
    for _ in range(chance.choice((1, 1, 2))):
        at = chance.randrange(len(wrong) + 1)
        line_end = wrong.find(b"\r\n")
        match chance.randrange(9):
            case 0 if at < len(wrong):
                wrong[at] ^= 1 << chance.randrange(8)
            case 1:
                del wrong[at : at + chance.choice((1, 2, 64, 9000))]
            case 2:
                wrong[at:at] = chance.randbytes(chance.choice((1, 2, 64)))
            case 3:
                wrong[: max(line_end, 0)] = chance.choice(NUMBERS)
            case 4:
                wrong[-2:] = chance.choice(TRAILERS) + b"\r\n"
            case 5:
                wrong += chance.choice((b"\r\n", b"0\r\n\r\n", bytes(wrong[:200]), b"GET / HTTP/1.1\r\n\r\n"))
            case 6:
                end = at + chance.choice((1, 70, 8300))
                wrong[at:at] = wrong[at:end]
            case 7:
                wrong[:] = wrong.replace(b"\r\n", chance.choice((b"\n", b"\r", b"\n\r", b"\r\r\n")), 1)
            case _:
                wrong[:] = wrong.replace(
                    b"chunk-signature", chance.choice((b"Chunk-Signature", b"x", b"")), 1
                )
    return bytes(wrong)


def pieces_of(chance: random.Random, body: bytes) -> Iterator[bytes]:
    """Split anywhere; sometimes at each byte."""
    at = 0
    most = (
        chance.choice((1, 3, 100, 8192, 1 << 18)) if len(body) < 3000 else chance.choice((500, 8192, 1 << 18))
    )
    while at < len(body):
        count = chance.randint(1, most)
        yield body[at : at + count]
        at += count


def decoded(payload: str, length: int, pieces: Iterator[bytes]) -> tuple[str, bytes]:
    """How it ends, and what was passed on before that."""
    decoder, data = ChunkDecoder(signer_of(payload), length), bytearray()
    try:
        for piece in pieces:
            for part in decoder.feed(piece):
                data += part
            assert len(decoder._line) <= LINE_BYTES_MAX
        decoder.finish()
    except S3Error as refused:
        return refused.code, bytes(data)
    assert sum(map(len, decoder.trailers)) <= TRAILER_BYTES_MAX
    return "", bytes(data)


def play(seed: int, count: int) -> Counter[str]:
    """Each case by two splits. A body that is taken is what was signed, or as long as was announced."""
    ends: Counter[str] = Counter()
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        payload, parts = chance.choice(WORDS), data_of(chance)
        data = b"".join(parts)
        trailers = {"x-amz-checksum-crc32": crc32_of(data)} if payload != SIGNED else {}
        body = chunked_body(signer_of(payload), parts, trailers)
        is_whole = chance.random() < 0.1
        is_short = any(len(part) < CHUNK_BYTES_MIN for part in parts[:-1])
        sent = body if is_whole else wronged(chance, body)
        length = len(data) if chance.random() < 0.9 else max(0, len(data) + chance.choice((-1, 1, 1 << 40)))
        one = decoded(payload, length, iter([sent]))
        code, got = one
        other_code, other_got = decoded(payload, length, pieces_of(chance, sent))
        # A piece that ends it passes nothing on.
        assert code == other_code, f"case {number}"
        assert other_got.startswith(got), f"case {number}"
        assert len(got) <= length
        if not code:
            assert len(got) == length
            assert payload == UNSIGNED_TRAILER or got == data, f"case {number}: not what was signed"
        if is_whole and length == len(data) and not (is_short and data):
            assert one == ("", data), f"case {number}: {code}"
        ends[code or "taken"] += 1
    return ends


def test_bodies_that_mean_harm_are_what_was_signed_or_are_refused(seed: int) -> None:
    ends = play(seed, CASES)
    assert set(ends) == {"taken", "IncompleteBody", "SignatureDoesNotMatch", "InvalidChunkSizeError"}
    assert min(ends.values()) > 3


@pytest.mark.parametrize("payload", WORDS)
def test_a_body_is_the_same_however_it_is_cut(payload: str) -> None:
    data = b"a" * CHUNK_BYTES_MIN + b"b" * 70
    trailers = {"x-amz-checksum-crc32": crc32_of(data)} if payload != SIGNED else {}
    body = chunked_body(signer_of(payload), [data[:CHUNK_BYTES_MIN], data[CHUNK_BYTES_MIN:]], trailers)
    near = {at for at in range(len(body)) if not CHUNK_BYTES_MIN > at > 200}
    for at in near:
        assert decoded(payload, len(data), iter([body[:at], body[at:]])) == ("", data), at
    assert decoded(payload, len(data), (bytes([each]) for each in body)) == ("", data)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_length_that_is_none_is_refused(number: bytes) -> None:
    for payload in WORDS:
        assert decoded(payload, 5, iter([number + b"\r\nhello\r\n0\r\n\r\n"]))[0] == "IncompleteBody"


def test_a_trailer_signature_stands_once_and_last() -> None:
    body = chunked_body(signer_of(SIGNED_TRAILER), [b"hello"], {"x-amz-checksum-crc32": crc32_of(b"hello")})
    signature = body[body.index(b"x-amz-trailer-signature") : -2]
    for wrong in (
        body[:-2] + signature + b"\r\n",
        body.replace(signature, b"x-amz-trailer-signature:\r\n" * 2),
    ):
        assert decoded(SIGNED_TRAILER, 5, iter([wrong]))[0] == "IncompleteBody"


@pytest.mark.parametrize(
    "said", [crc32_of(b"hellp"), "", "AAAA", "A" * 1000, "\xff", crc32_of(b"hello")[:-1]]
)
def test_a_checksum_of_other_bytes_is_told_before_anything_is_stored(said: str) -> None:
    headers = {"x-amz-decoded-content-length": "5", "x-amz-trailer": "x-amz-checksum-crc32"}
    sent = [chunked_body(signer_of(UNSIGNED_TRAILER), [b"hello"], {"x-amz-checksum-crc32": said})]

    async def receive() -> bytes | None:
        return sent.pop() if sent else None

    async def main() -> str:
        body = Body(headers, signer_of(UNSIGNED_TRAILER), receive)
        try:
            while (piece := await body.next_piece(1 << 20)) is not None:
                body.checks.update(piece)
            body.check()
        except S3Error as refused:
            return refused.code
        return "taken"

    assert trio.run(main) in ("BadDigest", "InvalidDigest", "IncompleteBody")


if __name__ == "__main__":
    for code, times in play(int(os.environ.get("G35_SEED", "35")), int(sys.argv[1])).most_common():
        print(f"{code:24} {times:9}")
