"""Requests that a reader has the first process answer: messages with descriptors, and bytes passed on."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable

import h11
import pytest
import trio
import trio.testing

from agent.http.connection import HEAD_BYTES_MAX, AnsweredElsewhere
from agent.http.server_side import ServerSide
from agent.s3.index import StoredObject
from agent.s3.processes.carrying import Carrier, Relay, RequestBytes, serve_carried
from agent.s3.processes.messages import (
    MESSAGE_BYTES_MAX,
    Ask,
    Carry,
    Done,
    Find,
    Found,
    decode_ask,
    decode_carried,
    encode_carry,
    encode_reply,
)
from agent.s3.processes.reader_objects import FirstProcess

SECONDS = 30.0
HEAD = b"PUT /a HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n"


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(SECONDS):
            await main()

    trio.run(bounded)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


async def served(client: socket.socket, peer: str, received: bytes) -> bool:
    await trio.lowlevel.checkpoint()
    client.close()
    return received == b"good"


def test_many_requests_wait_for_a_process_that_takes_none_for_now() -> None:
    count = 300

    async def main() -> None:
        ours, theirs = pair()
        carrier, goes_on = Carrier(theirs), []

        async def carry(client: socket.socket) -> None:
            goes_on.append(await carrier.carry(client.fileno(), "", b"good"))

        with ours, theirs, contextlib.ExitStack() as stack:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(carrier.hear)
                client, _ = [stack.enter_context(each) for each in socket.socketpair()]
                async with trio.open_nursery() as requests:
                    for _ in range(count):
                        requests.start_soon(carry, client)
                    await trio.testing.wait_all_tasks_blocked()
                    nursery.start_soon(serve_carried, ours, served)
                nursery.cancel_scope.cancel()
        assert goes_on == [True] * count

    run(main)


def test_all_answers_arrive_though_the_reader_takes_none_for_now() -> None:
    count = 1000

    async def main() -> None:
        ours, theirs = pair()
        with theirs:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve_carried, ours, served)
                theirs.setblocking(False)
                # Without a descriptor: the kernel leaves it out where a process may have no more.
                for number in range(count):
                    await trio.lowlevel.wait_writable(theirs)
                    theirs.send(encode_carry(Carry(number, "", b"good")))
                await trio.testing.wait_all_tasks_blocked()
                found = []
                for _ in range(count):
                    await trio.lowlevel.wait_readable(theirs)
                    found.append(decode_carried(theirs.recv(MESSAGE_BYTES_MAX)))
                assert sorted(each.number for each in found) == list(range(count))
                assert not any(each.goes_on for each in found)
                # It has descriptors again.
                one, other = socket.socketpair()
                with one, other:
                    socket.send_fds(theirs, [encode_carry(Carry(count, "", b"good"))], [one.fileno()])
                    await trio.lowlevel.wait_readable(theirs)
                    assert decode_carried(theirs.recv(MESSAGE_BYTES_MAX)).goes_on
                nursery.cancel_scope.cancel()

    run(main)


def request_of(data: bytes) -> RequestBytes:
    http = ServerSide(HEAD_BYTES_MAX)
    http.receive_data(data)
    assert http.next_event() is not h11.NEED_DATA
    return RequestBytes(http)


def test_a_process_that_refuses_a_body_reads_it_on() -> None:
    async def main() -> None:
        client, clients = trio.testing.memory_stream_pair()
        ours, theirs = trio.socket.socketpair()
        async with trio.SocketStream(ours) as other, trio.SocketStream(theirs) as process:
            relay = Relay(clients, other, request_of(HEAD), SECONDS)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(relay.run)
                await process.send_all(b"no")
                await process.send_eof()
                assert await client.receive_some() == b"no"
                await trio.testing.wait_all_tasks_blocked()
                await client.send_all(b"123")
                assert await process.receive_some() == b"123"
                await process.aclose()
                relay.answered.set()
            assert not relay.is_broken

    run(main)


@pytest.mark.parametrize("received", [HEAD, HEAD + b"0123456789"])
def test_a_process_learns_that_a_client_is_gone(received: bytes) -> None:
    async def main() -> None:
        client, clients = trio.testing.memory_stream_pair()
        ours, theirs = trio.socket.socketpair()
        async with trio.SocketStream(ours) as other, trio.SocketStream(theirs) as process:
            request = request_of(received)
            await request.rest()
            relay = Relay(clients, other, request, SECONDS)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(relay.run)
                await client.aclose()
                with contextlib.suppress(trio.BrokenResourceError):
                    while True:
                        await process.send_all(bytes(64 << 10))
                await process.aclose()
                relay.answered.set()
            assert relay.is_broken

    run(main)


def asked(link: socket.socket) -> Ask:
    return decode_ask(link.recv(MESSAGE_BYTES_MAX))


def found(hold: int) -> bytes:
    return encode_reply(Found(StoredObject("a", 1, "", 0), hold, {1: "one"}))


def test_an_answer_that_comes_late_costs_neither_the_link_nor_a_hold() -> None:
    ours, theirs = pair()
    with ours, theirs:
        theirs.settimeout(0.05)
        first = FirstProcess([theirs])
        for _ in range(2):  # over no link it is not asked again
            with pytest.raises(AnsweredElsewhere):
                first.ask(Find("one", "blocks", "a", holds=True))
        assert isinstance(asked(ours), Find)
        first.tell_done()
        assert first.is_owing
        ours.sendall(found(35))
        first.tell_done()
        assert asked(ours) == Done([35])
        assert not first.is_owing
        theirs.settimeout(SECONDS)
        ours.sendall(found(36))
        assert first.ask(Find("one", "blocks", "a", holds=True)) == Found(
            StoredObject("a", 1, "", 0), 36, {1: "one"}, []
        )


def test_holds_are_told_again_after_a_link_that_broke() -> None:
    (ours, theirs), (gone, broken) = pair(), pair()
    with ours, theirs, broken:
        gone.close()
        first = FirstProcess([theirs, broken])
        first.done(35)
        first.tell_done()
        assert first.is_owing
        first.tell_done()
        assert asked(ours) == Done([35])
        assert not first.is_owing


def test_all_threads_share_the_links() -> None:
    pairs = [pair() for _ in range(4)]
    first = FirstProcess([theirs for _, theirs in pairs])
    count, wrong = 200, []

    def answer(link: socket.socket) -> None:
        while message := link.recv(MESSAGE_BYTES_MAX):
            ask = decode_ask(message)
            if isinstance(ask, Find):
                link.sendall(found(int(ask.key)))

    def ask(key: int) -> None:
        for number in range(key * count, (key + 1) * count):
            reply = first.ask(Find("one", "blocks", str(number), holds=True))
            if not isinstance(reply, Found) or reply.hold != number:
                wrong.append(number)

    answering = [threading.Thread(target=answer, args=(ours,)) for ours, _ in pairs]
    asking = [threading.Thread(target=ask, args=(key,)) for key in range(len(pairs))]
    for each in (*answering, *asking):
        each.start()
    for each in asking:
        each.join()
    for ours, theirs in pairs:
        theirs.close()
        ours.shutdown(socket.SHUT_RDWR)
    for each in answering:
        each.join()
    for ours, _ in pairs:
        ours.close()
    assert not wrong
