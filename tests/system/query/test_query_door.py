"""The query door by real sockets: who comes in, what is refused early, and that nobody holds up others."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import ExitStack

import pytest

from agent.query.query_json import BODY_BYTES_MAX, KEYS_MAX
from tests.support.engines.s3_served import answer_of
from tests.support.pool.memory_pool import MemoryPool, key_of, stage_now
from tests.support.pool.queried import TOKENS, Queried, queried
from tests.support.waiting import wait_until

KEYS = [key_of(number) for number in range(20)]


def stored(door: Queried) -> None:
    for key in KEYS:
        door.agent.put(key, b"value")


def head(length: int | str, token: str = TOKENS["one"], more: str = "") -> bytes:
    return (
        f"POST /query HTTP/1.1\r\nhost: g35\r\nauthorization: Bearer {token}\r\n"
        f"content-length: {length}\r\n{more}\r\n"
    ).encode()


def connect(door: Queried) -> socket.socket:
    return socket.create_connection(("127.0.0.1", door.port), timeout=10)


def test_a_router_hears_how_long_the_run_is_and_goes_on_with_the_same_connection() -> None:
    with queried() as door:
        stored(door)
        assert door.ask(KEYS) == {
            "keys": 20, "run": 20, "memory": 0, "flash": 20, "g4": 0, "bytes": 100, "load_ms": None,
            "compute_ms": None, "hole": None,
        }  # fmt: skip
        body = json.dumps({"volume": "v", "prompts": [[KEYS[0].hex(), key_of(99).hex()], []]}).encode()
        with connect(door) as stream:
            for _ in range(3):
                stream.sendall(head(len(body)) + body)
                status, found = answer_of(stream)
                told = json.loads(found)["prompts"]
                assert (status, told[0]["run"], told[0]["hole"]["at"], told[1]["run"]) == (200, 1, 1, 0)


def test_no_thread_but_the_loop_takes_part_where_all_is_remembered() -> None:
    with queried() as door:
        stored(door)
        assert door.ask(KEYS)["run"] == 20
        assert door.runs == 0
        told = door.ask([*KEYS, key_of(99)])
        assert (told["run"], told["hole"]) == (20, {"at": 20, "cause": "never_stored"})
        assert door.runs == 1


def test_a_router_hears_which_values_wait_in_memory() -> None:
    agent = MemoryPool((64, 64), value_bytes=4096).agent(prestage_bytes=1 << 20)
    with queried(agent=agent) as door:
        stored(door)
        assert agent.prestage is not None
        for key in KEYS[3:10]:
            assert agent.channel.run(stage_now(agent.volume, agent.prestage, agent.channel, key))
        told = door.ask(KEYS)
        assert (told["run"], told["memory"], told["flash"], told["bytes"]) == (20, 7, 13, 100)
        assert (door.door.counters.keys_in_memory, door.door.counters.keys_on_flash) == (7, 13)


@pytest.mark.parametrize("token", ["", "x", "c" * 40, TOKENS["one"] + "a", TOKENS["one"][:-1]])
def test_a_wrong_token_learns_nothing(token: str) -> None:
    with queried() as door:
        for path in ("/query", "/other"):
            status, found = door.post(b"no json", headers={"authorization": f"Bearer {token}"}, path=path)
            assert (status, list(found)) == (401, ["error"])
        assert door.door.counters.tokens_refused == 2
        assert door.door.counters.requests == 0


def test_a_tenant_hears_nothing_of_another_ones_volume() -> None:
    with queried() as door:
        stored(door)
        told = [door.ask(KEYS, "two"), door.ask(KEYS, "two", "nothing")]
        assert told[0] == told[1]
        assert told[0]["hole"] == {"at": 0, "cause": "never_stored"}


def test_ten_million_keys_are_refused_before_a_byte_of_them_is_read() -> None:
    with queried() as door, connect(door) as stream:
        stream.sendall(head(10_000_000 * 35))
        status, found = answer_of(stream)
        assert (status, b"at the most" in found) == (413, True)
        stored(door)
        assert door.ask(KEYS)["run"] == 20


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (head("many"), 400),
        (head(2, more="").replace(b"content-length: 2\r\n", b""), 411),
        (head(2).replace(b"content-length: 2", b"transfer-encoding: chunked"), 411),
        (head(BODY_BYTES_MAX + 1), 413),
        (head(2).replace(b"POST", b"GET") + b"{}", 405),
        (head(2).replace(b"/query", b"/") + b"{}", 404),
        (head(2) + b"{}", 400),
        (b"POST /query HTTP/1.1\r\n" + b"x: y\r\n" * 300 + b"\r\n", 431),
    ],
)
def test_what_is_no_query_is_refused_and_the_door_goes_on(sent: bytes, status: int) -> None:
    with queried() as door:
        with connect(door) as stream:
            stream.sendall(sent)
            assert answer_of(stream)[0] == status
        stored(door)
        assert door.ask(KEYS)["run"] == 20


def test_a_tenant_with_too_many_queries_under_way_is_told_so_and_another_is_answered() -> None:
    with queried(requests=2) as door:
        with connect(door) as holding:
            holding.sendall(head(1000) + b"{")
            wait_until(lambda: _held(door) == 1, 10, "a query under way")
            status, found = door.post({"volume": "v", "prompts": [[]]})
            assert (status, "too many" in found["error"]) == (503, True)
            assert door.ask([], "two")["run"] == 0
        wait_until(lambda: _held(door) == 0, 10, "its end")
        assert door.ask([])["run"] == 0


def _held(door: Queried, name: str = "query-requests") -> int:
    [row] = [row for row in door.bounds.snapshot() if row["name"] == name]
    held: int = row["held"]
    return held


def test_of_a_peer_without_a_token_the_oldest_connection_gives_way() -> None:
    with queried(connections=16) as door, ExitStack() as stack:
        stored(door)
        for _ in range(16):
            stack.enter_context(connect(door))
        wait_until(lambda: door.door.counters.connections_refused >= 9, 10, "those that gave way")
        wait_until(lambda: _held(door, "query-connections") == 7, 10, "their ends")
        assert door.ask(KEYS)["run"] == 20


def test_a_tenant_has_no_more_than_its_share_of_the_connections() -> None:
    with queried(connections=8) as door, ExitStack() as stack:
        for count in range(1, 7):
            mine = stack.enter_context(connect(door))
            mine.sendall(head(2) + b"{}")
            assert answer_of(mine)[0] == 400
            assert _held(door, "query-tenant-connections") == count
        assert door.post({"volume": "v", "prompts": [[]]})[0] == 503
        wait_until(lambda: door.door.counters.connections == 6, 10, "the end of the refused one")
        assert door.ask([], "two")["run"] == 0


def test_a_tenant_beyond_its_keys_a_second_is_told_when_to_come_again() -> None:
    with queried(keys_per_s=1000) as door:
        # Then it owes keys of seven seconds, however long the answer takes.
        many = [key_of(number) for number in range(KEYS_MAX)]
        door.ask(many)
        assert door.post({"volume": "v", "prompts": [[]]})[0] == 429
        assert door.ask([], "two")["run"] == 0


def test_queries_at_once_are_all_answered() -> None:
    with queried(requests=64) as door:
        stored(door)
        found: list[int] = []

        def ask() -> None:
            for _ in range(5):
                found.append(door.ask(KEYS)["run"])

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [20] * 40


def test_the_most_keys_of_a_request_are_answered() -> None:
    with queried() as door:
        stored(door)
        whole = b"".join(KEYS) + bytes(16 * (KEYS_MAX - len(KEYS)))
        status, found = door.post({"volume": "v", "prompts": [whole.hex()]})
        assert (status, found["prompts"][0]["run"]) == (200, 20)


def test_the_status_tells_no_token() -> None:
    with queried() as door:
        door.ask([])
        told = repr(door.door.snapshot()) + repr(door.door._shared.tokens)
        assert not any(token in told for token in TOKENS.values())
