"""Every count that a stranger can raise, walked to its bound: it ends there, and others go on."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from agent.fs.control.face import (
    CONTROL_ROOT,
    SESSION_ANSWER_BYTES,
    TICKETS_IDLE_SECONDS,
    USUAL_ANSWER_BYTES,
    ControlFace,
)
from agent.fs.files.face import FilesFace
from agent.fs.interface import FACE_FILES, FACE_SHIFT, Caller, FsError
from agent.fs.kv_face import KV_ROOT, KvFace
from agent.fs.virtiofs.guest_view import HANDLES_MAX, NODES_MAX, GuestView
from agent.host_os.per_user_bounds import CATALOGUE, RESERVE_PART, Bounds
from agent.http.shares import Shares
from agent.http.unauthenticated_clients import KNOWN, UnprovenClient, UnprovenClients
from agent.pool.format.sealed_slot import UNITS_MAX
from agent.pool.steps import settle
from agent.s3.service import CONNECTIONS
from host_shim.control_wire import ANSWERS_MAX, FLAG_NO_ANSWER, KEYS_MAX, Operation, Request, data_offset
from host_shim.pool import Pool
from tests.support.engines.session_door import SessionDoor, refuse_prestage
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.pool.inline_runner import InlineRunner
from tests.support.pool.memory_blocks import MemoryBlockStore
from tests.support.pool.memory_pool import MemoryPool, PoolAgent
from tests.unit.agent.bounds.test_tables_of_the_pool import WALKS as TABLES
from tests.unit.shared.test_shared_bounds import WALKS as SHARED

OWNER, USER, OTHER = Caller(0), Caller(1000), Caller(1001)
RUN = InlineRunner()
MOST = 512
"""Of a bound that is walked, where the real one would take long."""
SESSION, STATUS = CONTROL_ROOT + 1, CONTROL_ROOT + 2
FILES_ROOT = FACE_FILES << FACE_SHIFT | 1
Walk = Callable[[Caller, int], object]
"""Takes one more, the i-th; FsError where there is none to be had."""


def small(name: str) -> Bounds:
    """Bounds of which one is small."""
    bounds = Bounds()
    bounds.of(CATALOGUE[name], min(MOST, CATALOGUE[name].most))
    return bounds


def until_refused(walk: Callable[[int], object], most: int) -> tuple[int, str]:
    """How often it went well, and the name of the errno that ended it."""
    for count in range(most):
        try:
            walk(count)
        except FsError as refused:
            return count, errno.errorcode[refused.errno]
    return most, ""


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Kv:
    def __init__(self, bounds: Bounds, agent: PoolAgent | None = None) -> None:
        self.agent = agent or MemoryPool((64, 64), value_bytes=4096).agent()
        self.face = KvFace([self.agent.served], lambda: self.agent.channel, bounds=bounds)
        self.folder = settle(self.face.lookup(OWNER, KV_ROOT, b"v"), self.agent.channel).attributes.ino

    def look(self, caller: Caller, number: int) -> int:
        name = key(number).hex().encode()
        return settle(self.face.lookup(caller, self.folder, name), self.agent.channel).attributes.ino

    def read(self, caller: Caller, number: int) -> None:
        ino = self.look(caller, 0)
        handle = settle(self.face.open(caller, ino, os.O_RDONLY), self.agent.channel).handle
        into = memoryview(bytearray(9))
        assert settle(self.face.read(ino, handle, 0, into), self.agent.channel) >= 5

    def write(self, caller: Caller, number: int) -> None:
        settle(
            self.face.create(caller, self.folder, b"new %d" % number, 0o644, os.O_WRONLY), self.agent.channel
        )


class Control:
    def __init__(self, bounds: Bounds, agent: PoolAgent | None = None) -> None:
        self.agent = agent or MemoryPool().agent()
        self.face = ControlFace(
            [self.agent.served],
            lambda: self.agent.channel,
            lambda: {"a": "b" * 30_000},
            refuse_prestage,
            bounds=bounds,
        )

    def session(self, caller: Caller) -> int:
        return settle(self.face.open(caller, SESSION, os.O_RDWR), self.agent.channel).handle

    def ask(self, session: int, request: Request) -> None:
        settle(self.face.write(SESSION, session, 0, memoryview(request.encode())), self.agent.channel)


@contextmanager
def kv_open(bounds: Bounds, tmp_path: Path) -> Iterator[Walk]:
    kv = Kv(bounds)
    kv.agent.put(key(0), b"value")
    yield kv.read


@contextmanager
def kv_writers(bounds: Bounds, tmp_path: Path) -> Iterator[Walk]:
    yield Kv(bounds).write


@contextmanager
def fs_open(bounds: Bounds, tmp_path: Path) -> Iterator[Walk]:
    face = FilesFace(tmp_path / "files.sqlite", MemoryBlockStore((512,)), bounds=bounds)
    entry, made = settle(face.create(OWNER, FILES_ROOT, b"file", 0o644, os.O_RDWR), RUN)
    ino = entry.attributes.ino
    settle(face.release(ino, made.handle), RUN)
    handles: list[int] = []
    yield lambda caller, _: handles.append(settle(face.open(caller, ino, os.O_RDONLY), RUN).handle)
    for handle in handles:
        settle(face.release(ino, handle), RUN)
    assert bounds.of(CATALOGUE["fs-open"]).held == 0
    face.close()


@contextmanager
def sessions(bounds: Bounds, tmp_path: Path) -> Iterator[Walk]:
    control = Control(bounds)
    yield lambda caller, _: control.session(caller)


@contextmanager
def status_files(bounds: Bounds, tmp_path: Path) -> Iterator[Walk]:
    control = Control(bounds)
    yield lambda caller, _: settle(control.face.open(caller, STATUS, os.O_RDONLY), control.agent.channel)


@contextmanager
def tickets(bounds: Bounds, tmp_path: Path) -> Iterator[Walk]:
    control = Control(bounds)
    sessions = {caller.uid: control.session(caller) for caller in (OWNER, USER, OTHER)}

    def bind(caller: Caller, number: int) -> None:
        request = Request(Operation.PUT, 1, "v", (key(number),), number % KEYS_MAX, 0, 1, (4096,))
        control.ask(sessions[caller.uid], request)

    yield bind
    for session in sessions.values():
        settle(control.face.release(SESSION, session), control.agent.channel)
    assert bounds.of(CATALOGUE["tickets"]).held == 0


WALKS = {
    "fs-open": fs_open, "kv-open": kv_open, "kv-writers": kv_writers, **SHARED,
    "sessions": sessions, "status-files": status_files, "tickets": tickets,
}  # fmt: skip
ELSEWHERE = {
    "answer-bytes", "guest-nodes", "kv-nodes", "guest-open", "s3-connections", "s3-tenant-connections",
    "s3-transfers", "s3-held-files", "s3-rdma-connections", "metrics-connections", "query-connections",
    "query-tenant-connections", "query-requests", "shared-nodes", "shared-names", "shared-discards",
    "shared-staged-bytes", "parked-requests",
}  # fmt: skip
"""Walked below, or where they are served: test_s3_busy.py, test_s3_store.py, test_s3_rdma.py,
test_metrics_listener.py, test_query_door.py, test_parked_requests.py, unit/shared/test_shared_bounds.py."""
CONFIGURED = {
    "directories", "prestaged-bytes", "registered-bytes", "begun-bytes", "write-back-bytes", "staging-bytes",
    "fs-nodes", "stored-later",
}  # fmt: skip
"""Sums that tables keep, which have tests of their own: test_memory_of_values.py, test_tables_of_the_pool.py,
test_puts_in_pieces.py, test_directory_cache.py, test_registered_memory.py, test_files_after_reply.py."""


def test_every_limit_of_the_product_is_walked(repository: Path) -> None:
    for path in (repository / "agent").rglob("*.py"):
        if "Limit(" in path.read_text(encoding="utf-8") and path.name != "per_user_bounds.py":
            importlib.import_module(".".join(path.relative_to(repository).with_suffix("").parts))
    assert set(CATALOGUE) == {*WALKS, *ELSEWHERE, *CONFIGURED, *TABLES}


@pytest.mark.parametrize("name", WALKS)
def test_one_user_takes_no_more_than_it_leaves_and_others_go_on(name: str, tmp_path: Path) -> None:
    bounds = small(name)
    bound, most = bounds.of(CATALOGUE[name]), min(MOST, CATALOGUE[name].most)
    with WALKS[name](bounds, tmp_path) as walk:
        count, refused = until_refused(lambda number: walk(USER, number), most)
        assert refused == CATALOGUE[name].refused
        reserve = most // RESERVE_PART
        assert count == (most - reserve) // 2 == bound.held
        walk(OTHER, count + 1)
        walk(OWNER, count + 2)
        assert bound.snapshot()["most_of_one"] == count
        assert bound.refusals == 1


@pytest.mark.parametrize("name", WALKS)
def test_one_costs_no_more_memory_than_is_said(name: str, tmp_path: Path) -> None:
    bounds, count = small(name), 200
    with WALKS[name](bounds, tmp_path) as walk:
        walk(OWNER, 0)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1, count + 1):
            walk(OWNER, number)
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert grown / count < CATALOGUE[name].bytes_each


def test_a_put_that_waits_for_its_last_unit_costs_no_more_memory_than_is_said() -> None:
    size, count = UNITS_MAX << 16, 100
    agent = MemoryPool((2, 2), value_bytes=size).agent()
    for namespace in agent.channel.namespaces:
        namespace.store = lambda offset, parts: None  # type: ignore[method-assign]
    control = Control(Bounds(), agent)
    session, data = control.session(OWNER), memoryview(bytes((UNITS_MAX - 1) << 16))

    def walk(number: int) -> None:
        request = Request(Operation.PUT, 1, "v", (key(number),), number, 0, FLAG_NO_ANSWER, (size,))
        control.ask(session, request)
        settle(control.face.write(SESSION, session, data_offset(number), data), agent.channel)

    for number in range(50):  # directories are read
        walk(number)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(50, 50 + count):
        walk(number)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown / count < CATALOGUE["tickets"].bytes_each


@pytest.mark.parametrize("name", ["kv-open", "tickets"])
def test_a_value_of_as_many_units_as_may_be_costs_no_more_memory_than_is_said(name: str) -> None:
    size, count = UNITS_MAX << 16, 100
    agent = MemoryPool((8, 8), value_bytes=size).agent()
    agent.put(key(0), bytes(size))
    kept = agent.volume.codec.proven_headers
    if name == "kv-open":
        kv = Kv(Bounds(), agent)
        walk = kv.read
    else:
        control = Control(Bounds(), agent)
        session = control.session(OWNER)

        def walk(caller: Caller, number: int) -> None:
            request = Request(Operation.GET, 1, "v", (key(0),), number, flags=FLAG_NO_ANSWER)
            control.ask(session, request)
            offset = data_offset(number)
            assert settle(
                control.face.read(SESSION, session, offset, memoryview(bytearray(9))), agent.channel
            )

    for number in range(40):  # units that are kept have a bound of their own
        walk(OWNER, number)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(count):
        kept._kept.clear()
        walk(OWNER, 40 + number)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown / count < CATALOGUE[name].bytes_each


def test_a_ticket_for_writing_costs_little_until_bytes_come(tmp_path: Path) -> None:
    with tickets(Bounds(), tmp_path) as walk:
        walk(OWNER, 0)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1, 1001):
            walk(OWNER, number)
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert grown / 1000 < 500


def test_an_idle_engine_leaves_its_tickets_to_another_of_its_user() -> None:
    control = Control(Bounds())
    channel, bound = control.agent.channel, control.face._tickets

    def bind(session: int) -> None:
        control.ask(session, Request(Operation.GET, 1, "v", (key(1),) * KEYS_MAX, flags=FLAG_NO_ANSWER))

    def read(session: int, ticket: int) -> None:
        settle(control.face.read(SESSION, session, data_offset(ticket), memoryview(bytearray(9))), channel)

    idle = [control.session(USER) for _ in range(20)]
    count, refused = until_refused(lambda at: bind(idle[at]), len(idle))
    assert (count, refused) == (14, "EAGAIN"), "nobody is idle yet"
    channel.clock += TICKETS_IDLE_SECONDS / 2
    bind(idle[0])
    another = control.session(USER)
    with pytest.raises(FsError):
        bind(another)
    channel.clock += TICKETS_IDLE_SECONDS / 2 + 1
    bind(another)
    assert bound.held == 2 * KEYS_MAX, "those of who has bound lately stay"
    read(idle[0], KEYS_MAX - 1)
    with pytest.raises(FsError) as stale:
        read(idle[1], 0)
    assert stale.value.errno == errno.ESTALE, "its client opens another session"
    bind(idle[1])
    read(idle[1], 0)
    for session in (*idle, another):
        settle(control.face.release(SESSION, session), channel)
    assert bound.held == 0


def test_a_session_that_was_closed_meanwhile_binds_no_tickets() -> None:
    control = Control(Bounds())
    session = control.session(USER)
    request = Request(Operation.GET, 1, "v", (key(1),), flags=FLAG_NO_ANSWER)
    asking = control.face.write(SESSION, session, 0, memoryview(request.encode()))
    settle(control.face.release(SESSION, session), control.agent.channel)
    with pytest.raises(FsError):
        settle(asking, control.agent.channel)
    assert control.face._tickets.held == 0


def test_a_reader_of_the_status_takes_no_session_from_an_engine() -> None:
    control = Control(Bounds())
    channel = control.agent.channel
    opened, refused = until_refused(lambda _: settle(control.face.open(USER, STATUS, 0), channel), 2000)
    assert refused == "ENFILE"
    assert opened < 256
    for _ in range(CATALOGUE["sessions"].most):
        control.session(OWNER)


def test_answers_that_nobody_reads_are_bounded_in_bytes_and_freed_as_they_are_read() -> None:
    bounds = Bounds()
    control = Control(bounds)
    bound = bounds.of(CATALOGUE["answer-bytes"])
    session = control.session(OWNER)
    stats = Request(Operation.STATS, 1, "")
    asked, refused = until_refused(lambda _: control.ask(session, stats), ANSWERS_MAX + 1)
    assert refused == "EAGAIN"
    assert asked < ANSWERS_MAX
    assert bound.held <= SESSION_ANSWER_BYTES + USUAL_ANSWER_BYTES + (32 << 10)
    into = memoryview(bytearray(1 << 20))
    while settle(control.face.read(SESSION, session, 0, into), control.agent.channel):
        pass
    assert bound.held == 0
    control.ask(session, stats)
    settle(control.face.release(SESSION, session), control.agent.channel)
    assert bound.held == 0


def test_a_guest_ends_at_its_own_bounds() -> None:
    view = GuestView(MemoryFileSystem())
    for number in range(NODES_MAX):
        view.books.nodes[number] = view.books.nodes.get(number)  # type: ignore[assignment]
    with pytest.raises(FsError) as refused:
        settle(view.lookup(USER, 1, b"a"), RUN)
    assert refused.value.errno == errno.ENFILE
    view.books.nodes.clear()
    for _ in range(HANDLES_MAX):
        view.books.opened(1, 0, 0, is_folder=True)
    with pytest.raises(FsError) as refused:
        settle(view.opendir(USER, 1, 0), RUN)
    assert refused.value.errno == errno.ENFILE
    assert (view.nodes_refused, view.opens_refused) == (1, 1)


def test_guests_share_what_all_doors_have_and_one_is_one_holder() -> None:
    bounds = small("kv-open")
    kv = Kv(bounds)
    kv.agent.put(key(0), b"value")
    count, _ = until_refused(lambda number: kv.read(Caller(number, guest="virtiofs-0"), 0), MOST)
    assert count == (MOST - MOST // RESERVE_PART) // 2, "whatever users it says they are"
    kv.read(Caller(0, guest="virtiofs-1"), 0)


def in_a_loop(work: Callable[[], None]) -> Callable[[], None]:
    """A test whose scopes are cancelled, for which there has to be an event loop."""

    async def main() -> None:
        work()

    @functools.wraps(work)
    def test() -> None:
        trio.run(main)

    return test


@in_a_loop
def test_a_peer_of_s3_has_half_until_it_shows_a_key() -> None:
    bound = Bounds().of(CONNECTIONS, 64, {KNOWN})
    clients = UnprovenClients(bound)
    held = [client_from(clients, "192.0.2.1") for _ in range(28)]
    other = client_from(clients, "192.0.2.2")
    assert not any(client.scope.cancel_called for client in (*held, other))
    late = client_from(clients, "192.0.2.1")
    assert [client.scope.cancel_called for client in held] == [True, *[False] * 27]
    assert (bound.held, bound.refusals) == (29, 1)
    held = [late, *held[1:]]
    for client in held:
        client.identify()
        client.identify()
    again = client_from(clients, "192.0.2.1")
    assert bound.refusals == 1, "those with a key are their tenant's"
    for each in (*held, other, again):
        each.leave()
        each.leave()
    assert bound.held == 0


def client_from(clients: UnprovenClients, peer: str) -> UnprovenClient:
    client = clients.enter(peer)
    assert client is not None
    return client


@in_a_loop
def test_who_connects_to_s3_without_a_key_gives_way_the_oldest_first() -> None:
    bound = Bounds().of(CONNECTIONS, 64, {KNOWN})
    clients = UnprovenClients(bound)
    crowd = [client_from(clients, f"192.0.2.{number}") for number in range(56)]
    assert not any(client.scope.cancel_called for client in crowd)
    newcomer = client_from(clients, "198.51.100.1")
    assert [client.scope.cancel_called for client in crowd].index(True) == 0
    assert bound.held == 56
    once_more = client_from(clients, "198.51.100.1")
    assert newcomer.scope.cancel_called, "its own goes before others'"
    assert sum(client.scope.cancel_called for client in crowd) == 1
    crowd[0].identify()
    assert bound.held == 56, "who has given way is nobody's any more"
    for client in crowd[1:]:
        client.identify()
    once_more.identify()
    for _ in range(8):
        client_from(clients, "192.0.2.1").identify()
    assert clients.enter("192.0.2.1") is None, "nobody without a key is left"
    clients.make_room()
    assert not any(client.scope.cancel_called for client in crowd[1:])


def test_refusals_of_shares_are_shown() -> None:
    shares = Shares(2, ["a"], wait_seconds=0)
    assert [shares.take_now("a") is not None for _ in range(3)] == [True, True, False]
    assert shares.of_each() == {"tenant 0": 2}


@pytest.mark.interpreted
def test_a_client_whose_tickets_find_no_room_has_misses_and_lets_go_of_its_own() -> None:
    agent = MemoryPool((2, 2), value_bytes=1 << 20).agent()
    values = [b"a" * 70_000, b"b" * 70_000]
    for number, value in enumerate(values):
        agent.put(key(number), value)
    door = SessionDoor(agent)
    bound = door.face._tickets = Bounds().of(CATALOGUE["tickets"], 2)
    assert bound.take(0, 2)
    with Pool("/nowhere", files=door) as pool:
        volume = pool.volume("v")
        into = [bytearray(1 << 20) for _ in values]
        assert volume.get_many([key(0), key(1)], into) == [None, None]
        assert volume.put_many([key(2)], [b"c" * 70_000]) == [False]
        bound.give_back(0, 2)
        assert volume.get_many([key(0), key(1)], into) == [70_000, 70_000]
    assert bound.held == 0


def test_values_that_kernels_remember_make_room_and_what_is_open_stays() -> None:
    bounds = small("kv-nodes")
    bound = bounds.of(CATALOGUE["kv-nodes"])
    kv = Kv(bounds)
    for number in range(MOST):
        kv.agent.put(key(number), b"value")
    kept = kv.look(USER, 0)
    handle = settle(kv.face.open(USER, kept, os.O_RDONLY), kv.agent.channel).handle
    seen = {number: kv.look(USER, number) for number in range(1, MOST)}
    assert bound.held <= (MOST - MOST // RESERVE_PART) // 2
    assert settle(kv.face.getattr(USER, kept, handle), kv.agent.channel).size == 5
    into = memoryview(bytearray(9))
    assert settle(kv.face.read(kept, handle, 0, into), kv.agent.channel) == 5
    with pytest.raises(FsError):
        settle(kv.face.getattr(USER, seen[1], None), kv.agent.channel)
    kv.face.forget(seen[1], 1)
    assert kv.look(USER, 1) not in seen.values(), "a new number, for the kernel looks the name up again"
    settle(kv.face.release(kept, handle), kv.agent.channel)
    for ino in list(kv.face._values):
        kv.face.forget(ino, 99)
    assert bound.held == 0
