"""A connection in virtual time: who takes an answer too slowly, and who sends it in crumbs."""

from __future__ import annotations

import logging
from typing import cast

import trio
import trio.testing

from agent.host_os.rate_limited_log import Complaints
from agent.http.connection import BODY_RATE_MIN, CHUNK_BYTES_MIN, CHUNKS_FREE, EVENTS_TOGETHER
from agent.http.gil_yield import Rests
from agent.http.shares import Shares
from agent.s3.answers import Answer, Send
from agent.s3.body import Body
from agent.s3.chunked import UNSIGNED_TRAILER
from agent.s3.connection import Connection
from agent.s3.counters import S3Counters
from agent.s3.requests import Hosts, S3Request
from agent.s3.service import S3Service
from agent.s3.signature import SigningKeys
from tests.support.engines.s3_served import KEY, signed_head

PIECE = 1 << 20
IDLE_SECONDS = 60.0


class Slow:
    """The bytes of an answer, each piece of which takes some time to come from the drives."""

    def __init__(self, pieces: int, seconds: float) -> None:
        self.length = pieces * PIECE
        self._pieces, self._seconds = pieces, seconds

    async def send(self, send: Send) -> None:
        for _ in range(self._pieces):
            await trio.sleep(self._seconds)
            await send(memoryview(bytes(PIECE)))

    async def close(self) -> None:
        pass


class FakeService:
    """Answers everything with the same stream, after it read the body, of which a piece takes some time."""

    def __init__(self, stream: Slow | None = None, seconds: float = 0.0) -> None:
        self.keys = {KEY.key_id: KEY}
        self.counters = S3Counters()
        self.hosts, self.region = Hosts(), "us-east-1"
        self.signing_keys = SigningKeys(self.region)
        self.connections = Shares(4, ["one"])
        self.rests = Rests()
        self._stream = stream
        self._seconds = seconds

    async def answer(self, request: S3Request, tenant: str, body: Body) -> Answer:
        piece = await body.next_piece(1 << 30)
        while piece is not None:
            await trio.sleep(self._seconds)
            piece = await body.next_piece(1 << 30)
        return Answer(stream=self._stream)


def serve(service: FakeService, stream: trio.abc.Stream) -> Connection:
    return Connection(
        cast(S3Service, service), stream, IDLE_SECONDS, Complaints(logging.getLogger("tests.s3"))
    )


def taken(stream: Slow, seconds: float, count: int) -> tuple[int, float]:
    """What a client gets that takes `count` bytes every so many seconds, and when it has it."""

    async def main() -> tuple[int, float]:
        theirs, ours = trio.testing.lockstep_stream_pair()
        began, got = trio.current_time(), 0

        async def run() -> None:
            await serve(FakeService(stream), ours).serve()
            await ours.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await theirs.send_all(signed_head("GET", "/blocks/a")[0])
            while data := await theirs.receive_some(count):
                got += len(data)
                at = trio.current_time() - began
                await trio.sleep(seconds)
            nursery.cancel_scope.cancel()
        return got, at

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_who_takes_an_answer_below_the_least_rate_is_hung_up_on() -> None:
    # A piece within the time of an idle connection each, which alone would go on for ever.
    got, at = taken(Slow(64, 0.0), 8.0, BODY_RATE_MIN * 4)
    assert got < 64 * PIECE
    assert at < IDLE_SECONDS + got / BODY_RATE_MIN + PIECE / BODY_RATE_MIN


def test_who_takes_it_slowly_and_steadily_gets_all_of_it() -> None:
    got, _ = taken(Slow(16, 0.0), 0.9, BODY_RATE_MIN)
    assert got > 16 * PIECE


def test_the_time_that_drives_take_is_not_the_clients() -> None:
    got, at = taken(Slow(8, 300.0), 0.0, PIECE)
    assert got > 8 * PIECE
    assert at >= 2400


def test_the_time_that_storing_a_body_takes_is_not_the_clients() -> None:
    async def main() -> bytes:
        theirs, ours = trio.testing.memory_stream_pair()
        head, _ = signed_head("PUT", "/blocks/a", {"content-length": str(4 * PIECE)})
        await theirs.send_all(head + bytes(4 * PIECE))
        await theirs.send_eof()
        await serve(FakeService(seconds=300.0), ours).serve()
        return bytes(await theirs.receive_some(1000))

    answer = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert answer.startswith(b"HTTP/1.1 200")


def sent_in(chunk: int, length: int) -> tuple[bytes, int, int]:
    """A body sent in HTTP chunks of that size, at once: the answer, the turns of others, and the chunks."""

    async def main(body: bytes) -> tuple[bytes, int]:
        theirs, ours = trio.testing.memory_stream_pair()
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        headers = {"x-amz-decoded-content-length": str(length), "transfer-encoding": "chunked"}
        await theirs.send_all(signed_head("PUT", "/blocks/a", headers, UNSIGNED_TRAILER)[0] + body)
        await theirs.send_eof()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(others)
            await serve(FakeService(), ours).serve()
            nursery.cancel_scope.cancel()
        return bytes(await theirs.receive_some(1000)), turns

    inner = f"{length:x}\r\n".encode() + bytes(length) + b"\r\n0\r\n\r\n"
    pieces = [inner[at : at + chunk] for at in range(0, len(inner), chunk)]
    body = b"".join(f"{len(each):x}\r\n".encode() + each + b"\r\n" for each in pieces) + b"0\r\n\r\n"
    answer, turns = trio.run(main, body)
    return answer, turns, len(pieces)


def test_a_body_in_crumbs_is_refused_and_others_have_turns_while_it_comes() -> None:
    answer, turns, chunks = sent_in(1, 1000)
    assert answer.startswith(b"HTTP/1.1 200")
    assert turns > chunks / EVENTS_TOGETHER
    answer, turns, _ = sent_in(1, 400_000)
    assert b"InvalidChunkSizeError" in answer
    assert turns > CHUNKS_FREE / EVENTS_TOGETHER


def test_a_body_in_chunks_of_some_size_is_taken() -> None:
    assert sent_in(CHUNK_BYTES_MIN, 4_000_000)[0].startswith(b"HTTP/1.1 200")


class AtTheLastMoment(trio.abc.Stream):
    """A client each of whose bytes comes a moment after the time for it, and that takes answers so."""

    def __init__(self, sent: bytes, late_after: int) -> None:
        self._sent = sent
        self._late_after = late_after
        self.answers = b""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._late_after:
            self._late_after -= 1
        else:
            await trio.lowlevel.checkpoint()
            with trio.CancelScope(shield=True):
                await trio.sleep(IDLE_SECONDS + 0.01)
        found, self._sent = self._sent[:max_bytes], self._sent[max_bytes or 1 :]
        return found

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        with trio.CancelScope(shield=True):
            await trio.sleep(IDLE_SECONDS + len(data) / BODY_RATE_MIN + 0.01)
        self.answers += bytes(data)

    async def wait_send_all_might_not_block(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


def test_who_sends_at_the_last_moment_is_too_slow_and_no_bug() -> None:
    head, _ = signed_head("PUT", "/blocks/a", {"content-length": "9"})

    class InCrumbs(AtTheLastMoment):
        async def receive_some(self, max_bytes: int | None = None) -> bytes:
            return await super().receive_some(len(head) if self._sent.startswith(b"PUT") else 1)

    crumbs = InCrumbs(head + b"123456789", 1)
    trio.run(serve(FakeService(), crumbs).serve, clock=trio.testing.MockClock(autojump_threshold=0))
    assert b"RequestTimeout" in crumbs.answers
    assert b"InternalError" not in crumbs.answers


def test_who_takes_at_the_last_moment_is_too_slow_and_no_bug() -> None:
    head, _ = signed_head("GET", "/blocks/a")
    stream = AtTheLastMoment(head, 99)
    trio.run(
        serve(FakeService(Slow(2, 0.0)), stream).serve, clock=trio.testing.MockClock(autojump_threshold=0)
    )
    assert stream.answers.startswith(b"HTTP/1.1 200")
    assert len(stream.answers) < 2 * PIECE


def test_who_takes_no_refusal_of_nonsense_is_no_bug() -> None:
    class TakesNothing(AtTheLastMoment):
        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            await trio.sleep_forever()

    stream = TakesNothing(b"nonsense\r\n\r\n", 99)
    trio.run(serve(FakeService(), stream).serve, clock=trio.testing.MockClock(autojump_threshold=0))


class CountedRests(Rests):
    turns = 0

    async def after_turn(self, began: float) -> None:
        self.turns += 1


def test_a_refused_client_costs_a_rest() -> None:
    service = FakeService()
    service.rests = rests = CountedRests()

    async def main() -> bytes:
        theirs, ours = trio.testing.memory_stream_pair()
        await theirs.send_all(b"GET /blocks/a HTTP/1.1\r\nhost: x\r\n\r\n")
        await serve(service, ours).serve()
        return bytes(await theirs.receive_some(10_000))

    assert b"AccessDenied" in trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert rests.turns == 1
