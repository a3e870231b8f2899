"""The client of the mount against a scripted agent: what it returns, and what it never raises."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from host_shim.block_key import key_of
from host_shim.control_session import AGENT_GONE
from host_shim.control_wire import FLAG_NO_ANSWER, Operation, Outcome
from host_shim.pool import BufferTooSmall, Pool, UnknownVolume, ValueTooLong, Volume, unknown_volume
from host_shim.session_files import Refusal
from tests.support.engines.scripted_agent import ScriptedAgent

KEY, OTHER = key_of("one"), key_of("other")


@pytest.fixture
def agent() -> ScriptedAgent:
    return ScriptedAgent()


@pytest.fixture
def pool(agent: ScriptedAgent) -> Iterator[Pool]:
    with Pool("/nowhere", files=agent) as pool:
        yield pool
    assert agent.open_files == 0


@pytest.fixture
def volume(pool: Pool) -> Volume:
    return pool.volume("kv")


def test_a_value_comes_back_into_the_callers_buffer(agent: ScriptedAgent, volume: Volume) -> None:
    assert volume.put(KEY, b"x" * 5000)
    buffer = bytearray(8192)
    assert volume.get_into(KEY, buffer) == 5000
    assert buffer[:5000] == b"x" * 5000
    assert buffer[5000:] == bytes(3192)
    assert volume.get(KEY) == b"x" * 5000
    assert agent.opens == 1


def test_a_get_is_one_request_without_an_answer_and_one_read(agent: ScriptedAgent, volume: Volume) -> None:
    volume.get_into(KEY, bytearray(10))
    (request,) = agent.requests
    assert request.operation is Operation.GET
    assert request.flags == FLAG_NO_ANSWER


def test_a_miss_is_none(volume: Volume) -> None:
    assert volume.get_into(KEY, bytearray(10)) is None
    assert volume.get(KEY) is None


def test_many_values_and_a_map_of_the_holes(agent: ScriptedAgent, volume: Volume) -> None:
    keys = [key_of(f"block {number}") for number in range(40)]
    values = [bytes([number]) * (100 + number) for number in range(40)]
    assert volume.put_many(keys, values) == [True] * 40
    volume.delete(keys[::3])
    buffers = [bytearray(200) for _ in keys]
    found = volume.get_many(keys, buffers)
    assert found == [None if number % 3 == 0 else 100 + number for number in range(40)]
    for number, buffer in enumerate(buffers):
        if number % 3:
            assert buffer[: 100 + number] == values[number]
    assert sum(request.operation is Operation.GET for request in agent.requests) == 1


def test_more_keys_than_a_request_can_carry(agent: ScriptedAgent, volume: Volume) -> None:
    keys = [number.to_bytes(16, "big") for number in range(5000)]
    agent.values["kv", keys[4999]] = b"last"
    assert volume.exists(keys) == [False] * 4999 + [True]
    assert len(agent.requests) == 2
    lengths = volume.get_many(keys, [bytearray(8)] * 5000)
    assert lengths[4998:] == [None, 4]


def test_exists_is_one_round_trip(agent: ScriptedAgent, volume: Volume) -> None:
    volume.put(KEY, b"v")
    agent.requests.clear()
    assert volume.exists([OTHER, KEY]) == [False, True]
    assert len(agent.requests) == 1
    agent.causes[OTHER] = Outcome.EXPIRED
    assert volume.lookup([OTHER, KEY]) == [Outcome.EXPIRED, Outcome.HIT]


def test_the_longest_prefix_is_one_round_trip(agent: ScriptedAgent, volume: Volume) -> None:
    keys = [key_of(f"block {number}") for number in range(8)]
    volume.put_many(keys[:3] + keys[4:], [b"v"] * 7)
    agent.requests.clear()
    assert volume.longest_prefix(keys) == 3
    assert len(agent.requests) == 1
    assert volume.longest_prefix(keys[4:]) == 4
    assert volume.longest_prefix([]) == 0
    agent.kill()
    assert volume.longest_prefix(keys) == 0


def test_nothing_asked_for_is_nothing_found(agent: ScriptedAgent, volume: Volume) -> None:
    assert volume.exists([]) == []
    assert volume.get_many([], []) == []
    assert volume.put_many([], []) == []


def test_prestage_pin_delete(agent: ScriptedAgent, volume: Volume) -> None:
    volume.put(KEY, b"v")
    assert volume.prestage([KEY, OTHER]) == [True, False]
    assert agent.prestaged == [KEY]
    assert volume.pin([KEY, OTHER], ttl=0.5) == [True, False]
    assert agent.expiries[KEY] == 1
    assert volume.delete([KEY, OTHER]) == [True, False]
    assert volume.exists([KEY]) == [False]


def test_time_to_live_goes_along_in_whole_seconds(agent: ScriptedAgent, volume: Volume) -> None:
    volume.put(KEY, b"v", ttl=59.01)
    assert agent.expiries[KEY] == 60
    with pytest.raises(ValueError, match="4294967295"):
        volume.put(KEY, b"v", ttl=1 << 40)


def test_causes_of_holes_cost_a_round_trip_only_where_there_are_holes(
    agent: ScriptedAgent, volume: Volume
) -> None:
    volume.put(KEY, b"v")
    agent.causes[OTHER] = Outcome.EVICTED
    found = volume.fetch([KEY, OTHER], [bytearray(4), bytearray(4)])
    assert [one.outcome for one in found] == [Outcome.HIT, Outcome.EVICTED]
    assert [one.length for one in found] == [1, None]
    agent.requests.clear()
    volume.fetch([KEY], [bytearray(4)])
    assert [request.operation for request in agent.requests] == [Operation.GET]


def test_stats(pool: Pool, volume: Volume) -> None:
    volume.put(KEY, b"v")
    assert volume.stats() == {"name": "kv", "value_bytes": 1 << 20, "slots": 0}
    assert pool.stats() == {"values": 1, "volumes": [volume.stats()]}


@pytest.mark.parametrize("code", sorted(AGENT_GONE - {errno.EIO}), ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize("call", [0, 1], ids=["request", "transfer"])
def test_a_dead_agent_is_a_miss_and_the_next_call_opens_anew(
    agent: ScriptedAgent, volume: Volume, code: int, call: int
) -> None:
    volume.put(KEY, b"v")
    used = agent.opens
    for attempt in (
        lambda: volume.get_into(KEY, bytearray(4)) is None,
        lambda: volume.get(KEY) is None,
        lambda: volume.exists([KEY]) == [False],
        lambda: volume.prestage([KEY]) == [False],
        lambda: volume.put(OTHER, b"w") is False,
        lambda: volume.stats() == {},
    ):
        _fail_at(agent, call, code)
        assert attempt()
        assert volume.get(KEY) == b"v"
        used += 1
        assert agent.opens == used


def test_one_value_that_cannot_be_had_does_not_cost_the_session(agent: ScriptedAgent, volume: Volume) -> None:
    volume.put(KEY, b"v")
    _fail_at(agent, 1, errno.EIO)
    assert volume.get_into(KEY, bytearray(4)) is None
    _fail_at(agent, 1, errno.EIO)
    assert volume.put(OTHER, b"w") is False
    assert volume.get(KEY) == b"v"
    assert agent.opens == 1


def _fail_at(agent: ScriptedAgent, call: int, code: int) -> None:
    """Let `call` system calls through and fail the next."""
    original = agent._checked
    left = [call]

    def checked(descriptor: int) -> object:
        if left[0] == 0:
            agent._checked = original  # type: ignore[method-assign]
            raise Refusal(code, "scripted")
        left[0] -= 1
        return original(descriptor)

    agent._checked = checked  # type: ignore[method-assign, assignment]


def test_no_agent_no_mount_no_exception(agent: ScriptedAgent, pool: Pool, volume: Volume) -> None:
    volume.put(KEY, b"v")
    agent.kill()
    assert not pool.alive()
    for _ in range(3):
        assert volume.get_into(KEY, bytearray(4)) is None
        assert volume.get(KEY) is None
        assert volume.get_many([KEY, OTHER], [bytearray(4), bytearray(4)]) == [None, None]
        assert volume.exists([KEY]) == [False]
        assert volume.pin([KEY]) == [False]
        assert volume.put(KEY, b"w") is False
        assert volume.put_many([KEY, OTHER], [b"1", b"2"]) == [False, False]
        assert volume.stats() == {}
    assert volume.fetch([KEY], [bytearray(4)])[0].outcome is None
    agent.restart()
    assert pool.alive()
    assert volume.get(KEY) == b"v"


def test_a_real_path_that_is_no_mount_is_a_miss() -> None:
    with Pool("/proc/nowhere") as pool:
        assert pool.volume("kv").get(KEY) is None
        assert not pool.alive()


def test_an_ordinary_file_in_the_sessions_place_is_no_pool(tmp_path: Path) -> None:
    """It would give back what was written to it, under any key."""
    session = tmp_path / ".g35" / "session"
    session.parent.mkdir()
    session.write_bytes(b"")
    with Pool(tmp_path) as pool:
        volume = pool.volume("kv")
        assert volume.put(KEY, b"value") is False
        assert volume.get(OTHER) is None
        assert not pool.alive()
    assert session.read_bytes() == b""


def test_a_long_read_that_broke_off_is_a_miss_and_no_short_value(
    agent: ScriptedAgent, volume: Volume
) -> None:
    volume.put(KEY, b"v" * 600_000)
    buffer = bytearray(1 << 20)
    assert volume.get_into(KEY, buffer) == 600_000
    agent.cut_off = 262_144
    assert volume.get_into(KEY, buffer) is None
    assert volume.get(KEY) is None
    assert volume.fetch([KEY], [buffer])[0].outcome is Outcome.CORRUPT


def test_a_buffer_that_is_too_small_is_said(
    agent: ScriptedAgent, volume: Volume, expects_log: Callable[..., None]
) -> None:
    expects_log("a value of a batch is not read: .* longer than the buffer of 1 bytes")
    volume.put(KEY, b"v" * 5000)
    volume.put(OTHER, b"w" * 100)
    for size in (1, 4096, 4999):
        with pytest.raises(BufferTooSmall, match=f"longer than the buffer of {size} bytes"):
            volume.get_into(KEY, bytearray(size))
        assert volume.get_many([OTHER, KEY], [bytearray(100), bytearray(size)]) == [100, None]
        outcomes = [one.outcome for one in volume.fetch([KEY, OTHER], [bytearray(size), bytearray(100)])]
        assert outcomes == [Outcome.REFUSED, Outcome.HIT]
    assert volume.get_into(KEY, bytearray(5000)) == 5000
    assert volume.get_many([OTHER, KEY], [bytearray(100), bytearray(5000)]) == [100, 5000]
    assert agent.opens == 1, "the session goes on"


def test_a_buffer_as_long_as_the_slots_costs_no_second_read(agent: ScriptedAgent, volume: Volume) -> None:
    volume.put(KEY, b"v" * (1 << 20))
    buffer = bytearray(1 << 20)
    assert volume.get_into(KEY, buffer) == 1 << 20
    reads = agent.reads
    for _ in range(5):
        assert volume.get_into(KEY, buffer) == 1 << 20
        assert volume.get_many([KEY], [buffer]) == [1 << 20]
    assert agent.reads == reads + 10
    asked = [request.operation for request in agent.requests]
    assert asked.count(Operation.STATS) == 1


def test_a_full_buffer_of_an_agent_that_died_is_a_miss(agent: ScriptedAgent, volume: Volume) -> None:
    """Nobody can say whether it was the whole value."""
    volume.put(KEY, b"v" * 5000)
    for call in (2, 3):  # what asks how long a value may be, and its answer
        _fail_at(agent, call, errno.ENOTCONN)
        assert volume.get_into(KEY, bytearray(4096)) is None
        _fail_at(agent, call, errno.ENOTCONN)
        assert volume.get_many([KEY], [bytearray(4096)]) == [None]


@pytest.mark.parametrize("size", [1, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 16 << 20])
def test_get_finds_the_length_by_itself(size: int) -> None:
    agent = ScriptedAgent(slot_bytes=16 << 20)
    with Pool("/nowhere", files=agent) as pool:
        volume = pool.volume("kv")
        value = os.urandom(1024) * (size // 1024) + b"e" * (size % 1024)
        assert volume.put(KEY, value)
        assert volume.get(KEY) == value


@pytest.mark.parametrize(
    "answer",
    [b"", b"x" * 10, b"g35a" + bytes(40), b"\xff" * 64],
    ids=["nothing", "short", "wrong version", "noise"],
)
def test_an_answer_that_makes_no_sense_ends_the_session(
    agent: ScriptedAgent, volume: Volume, answer: bytes
) -> None:
    volume.put(KEY, b"v")
    agent.mangle = lambda _real: answer
    assert volume.exists([KEY, OTHER]) == [False, False]
    agent.mangle = None
    assert volume.exists([KEY, OTHER]) == [True, False]
    assert agent.opens == 2


@pytest.mark.parametrize("at", [8, 32], ids=["request id", "outcome"])
def test_a_changed_answer_ends_the_session(agent: ScriptedAgent, volume: Volume, at: int) -> None:
    agent.mangle = lambda real: real[:at] + b"\xee" + real[at + 1 :]
    assert volume.exists([KEY]) == [False]
    agent.mangle = None
    assert volume.exists([KEY]) == [False]
    assert agent.opens == 2


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 17])
def test_a_key_of_another_length_is_wrong_use(volume: Volume, key: bytes) -> None:
    for call in (
        lambda: volume.get(key),
        lambda: volume.get_into(key, bytearray(4)),
        lambda: volume.put(key, b"v"),
        lambda: volume.exists([KEY, key]),
        lambda: volume.delete([key]),
    ):
        with pytest.raises(ValueError, match="a key has 16 bytes"):
            call()


def test_other_wrong_use_is_said_clearly(agent: ScriptedAgent, pool: Pool, volume: Volume) -> None:
    with pytest.raises(TypeError, match="key_of"):
        volume.get("0" * 16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="writable"):
        volume.get_into(KEY, b"1234")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no room"):
        volume.get_into(KEY, bytearray())
    with pytest.raises(ValueError, match="2 keys and 1 buffers"):
        volume.get_many([KEY, OTHER], [bytearray(4)])
    with pytest.raises(ValueError, match="time to live"):
        volume.put(KEY, b"v", ttl=0)
    with pytest.raises(ValueTooLong):
        volume.put(KEY, b"")
    with pytest.raises(ValueTooLong, match="'kv'"):
        volume.put(KEY, bytes((1 << 20) + 1))
    with pytest.raises(ValueError, match="name"):
        pool.volume("")
    assert volume.put(KEY, b"and it goes on")


def test_a_volume_that_is_not_there(pool: Pool) -> None:
    nowhere = pool.volume("nowhere")
    for call in (
        lambda: nowhere.get(KEY),
        lambda: nowhere.get_into(KEY, bytearray(4)),
        lambda: nowhere.put(KEY, b"v"),
        lambda: nowhere.exists([KEY]),
        lambda: nowhere.stats(),
    ):
        with pytest.raises(UnknownVolume, match=r"no volume 'nowhere'$"):
            call()


def test_a_volume_of_files_is_named_as_what_it_is() -> None:
    stats = {"volumes": [{"name": "kv", "kind": "kv"}, {"name": "files", "kind": "files"}]}
    assert "'files' is of kind files" in str(unknown_volume("files", stats))
    assert str(unknown_volume("file", stats)) == "the pool has no volume 'file'"


def test_of_a_volume_that_is_not_there_the_nearest_one_is_named(agent: ScriptedAgent) -> None:
    agent.serve(("kv-large", "files"))
    with Pool("/nowhere", files=agent, sessions=1) as pool:
        near = pool.volume("kv-lagre")
        assert str(unknown_volume("KV", {"volumes": [{"name": "kv"}]})).endswith("(did you mean kv?)")
        for call in (lambda: near.get(KEY), lambda: near.put(KEY, b"v"), near.stats):
            with pytest.raises(UnknownVolume, match=r"no volume 'kv-lagre' \(did you mean kv-large\?\)$"):
                call()


@pytest.mark.parametrize("first", ["put", "get_into", "get", "fetch", "exists"])
def test_a_volume_that_is_there_no_more_is_a_miss(agent: ScriptedAgent, pool: Pool, first: str) -> None:
    """Its tenant was erased: that is the pool's state, and no wrong use."""
    kv, room = pool.volume("kv"), bytearray(8192)
    {
        "put": lambda: kv.put(KEY, b"v"),
        "get_into": lambda: kv.get_into(KEY, room),
        "get": lambda: kv.get(KEY),
        "fetch": lambda: kv.fetch([KEY], [room]),
        "exists": lambda: kv.exists([KEY]),
    }[first]()
    agent.serve(())
    again = pool.volume("kv")
    assert again.get_into(KEY, room) is again.get_into(KEY, bytearray(1 << 20)) is again.get(KEY) is None
    assert [each.outcome for each in again.fetch([KEY, OTHER], [room, bytearray(9)])] == [
        Outcome.WRONG_KEY
    ] * 2
    assert again.get_many([KEY], [room]) == [None]
    assert again.put_many([KEY, OTHER], [b"v", b"w"]) == [again.put(KEY, b"v")] * 2 == [False] * 2
    assert again.lookup([KEY]) == [Outcome.WRONG_KEY]
    assert again.exists([KEY]) == again.prestage([KEY]) == again.pin([KEY]) == again.delete([KEY]) == [False]
    assert (again.longest_prefix([KEY]), again.stats()) == (0, {})
    agent.serve(("kv",))
    assert again.put(KEY, b"v")


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EAGAIN, errno.EINTR])
def test_a_get_for_which_the_kernel_has_no_room_is_a_miss(
    agent: ScriptedAgent, volume: Volume, code: int
) -> None:
    volume.put(KEY, b"v")
    for get in (
        lambda: volume.get(KEY),
        lambda: volume.get_into(KEY, bytearray(1 << 20)),
        lambda: volume.fetch([KEY], [bytearray(9)])[0].length,
    ):
        _fail_at(agent, 1, code)
        assert get() is None
        assert get() is not None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EIO])
def test_a_put_that_is_refused_is_false(agent: ScriptedAgent, volume: Volume, code: int) -> None:
    volume.exists([])
    _fail_at(agent, 1, code)
    assert volume.put(KEY, b"v") is False
    assert volume.put(KEY, b"v") is True
    assert agent.opens == 1


def test_threads_share_a_bounded_number_of_sessions(agent: ScriptedAgent) -> None:
    with Pool("/nowhere", sessions=3, files=agent) as pool:
        volume = pool.volume("kv")
        wrong: list[int] = []

        def work(number: int) -> None:
            buffer = bytearray(64)
            for turn in range(50):
                key, value = key_of(f"{number} {turn}"), f"{number} {turn}".encode()
                stored = volume.put(key, value)
                length = volume.get_into(key, buffer)
                if not stored or length is None or buffer[:length] != value:
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert agent.opens <= 3


def test_a_closed_pool_says_so(agent: ScriptedAgent) -> None:
    pool = Pool("/nowhere", files=agent)
    volume = pool.volume("kv")
    volume.put(KEY, b"v")
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        volume.get(KEY)
    assert agent.open_files == 0


def test_after_a_fork_the_child_opens_sessions_of_its_own(repository: Path) -> None:
    # In a process of its own: this one may have threads, which a fork would not bring along.
    script = (
        "import os\n"
        "from host_shim.pool import Pool\n"
        "from tests.support.engines.scripted_agent import ScriptedAgent\n"
        "agent = ScriptedAgent()\n"
        "pool = Pool('/nowhere', files=agent)\n"
        "volume = pool.volume('kv')\n"
        "volume.put(b'k' * 16, b'v')\n"
        "child = os.fork()\n"
        "assert volume.get(b'k' * 16) == b'v'\n"
        "assert agent.opens == (1 if child else 2)\n"
        "if not child: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=repository)
