"""Values under long names: whatever goes wrong on the way, the wrong block is a miss."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_shim import control_session, named_values
from host_shim.control_session import Session
from host_shim.control_wire import Outcome, data_offset
from host_shim.named_values import LABEL_BYTES, NamedValues, key_of_long_name, label_of, name_of
from host_shim.pool import Pool
from host_shim.prefix_records import leading_hits
from host_shim.session_files import Files
from tests.support.engines.scripted_agent import ScriptedAgent

FROZEN_KEY = "2aac971c47bb871878c7768366ae7ac3"
FROZEN_LABEL = (
    "67333576010000000504030201000000be4042803af92e862bf8d22f9c30ff12ed6e12de92a70b86"
    "7284f3c5e141380500000000000000000000000000000000"
)
NAME, OTHER = name_of("engine", "one"), name_of("engine", "other")


@pytest.fixture
def agent() -> ScriptedAgent:
    return ScriptedAgent()


@pytest.fixture
def values(agent: ScriptedAgent) -> Iterator[NamedValues]:
    with Pool("/nowhere", files=agent) as pool:
        yield NamedValues(pool, "kv")


def loaded(values: NamedValues, name: bytes, size: int, exact: bool = True) -> bytes | None:
    room = bytearray(size)
    (length,) = values.load([name], [[room]], exact=exact)
    return None if length is None else bytes(room[:length])


def stored_at(name: bytes) -> tuple[str, bytes]:
    return "kv", key_of_long_name(name)


@given(st.lists(st.lists(st.one_of(st.binary(), st.text(), st.integers()), max_size=4), max_size=6))
def test_different_fields_make_different_names(lists: list[list[bytes | str | int]]) -> None:
    def plain(fields: list[bytes | str | int]) -> list[bytes]:
        return [each if isinstance(each, bytes) else str(each).encode("utf-8", "replace") for each in fields]

    lists = [[each for each in fields if not _surrogates(each)] for fields in lists]
    lists.sort(key=lambda fields: name_of(*fields))
    for one, next_one in pairwise(lists):
        assert (name_of(*one) == name_of(*next_one)) == (plain(one) == plain(next_one))


def _surrogates(field: bytes | str | int) -> bool:
    return isinstance(field, str) and any(0xD800 <= ord(each) <= 0xDFFF for each in field)


def test_the_label_is_frozen() -> None:
    """Bytes on flash: an engine with a newer version of this file reads what the older one wrote."""
    assert name_of("lm", b"\x01", 7).hex() == "020000006c6d01000000010100000037"
    assert key_of_long_name(b"name").hex() == FROZEN_KEY
    assert label_of(b"name", 0x0102030405).hex() == FROZEN_LABEL


def test_a_value_of_several_parts_comes_back_into_several_rooms(
    agent: ScriptedAgent, values: NamedValues
) -> None:
    assert values.store([NAME, OTHER], [[b"abc", bytearray(b"de")], [b"x" * 300]]) == [True, True]
    assert agent.values[stored_at(NAME)] == label_of(NAME, 5) + b"abcde"
    rooms = [bytearray(1), bytearray(4), bytearray(300)]
    assert values.load([NAME, OTHER], [rooms[:2], rooms[2:]]) == [5, 300]
    assert rooms == [b"a", b"bcde", b"x" * 300]


def test_two_names_that_collide_in_128_bits_are_misses_for_each_other(
    agent: ScriptedAgent, values: NamedValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_values, "key_of_long_name", lambda name: bytes(16))
    assert values.store([NAME], [[b"mine"]]) == [True]
    assert values.exists([OTHER]) == [True]  # only a load can tell
    assert loaded(values, OTHER, 4) is None
    assert agent.values == {}  # or the other could never be stored
    assert values.store([OTHER], [[b"this"]]) == [True]
    assert loaded(values, OTHER, 4) == b"this"


def test_an_entry_whose_slot_holds_another_requests_block_is_a_miss(
    agent: ScriptedAgent, values: NamedValues
) -> None:
    values.store([NAME, OTHER], [[b"mine"], [b"this"]])
    agent.values[stored_at(NAME)] = agent.values[stored_at(OTHER)]
    assert loaded(values, NAME, 4) is None
    assert loaded(values, OTHER, 4) == b"this"


def test_a_value_of_another_length_is_a_miss_and_makes_room(
    agent: ScriptedAgent, values: NamedValues
) -> None:
    for size in (5, 3):
        values.store([NAME], [[b"four"]])
        assert loaded(values, NAME, size) is None
        assert agent.values == {}
    values.store([NAME], [[b"four"]])
    assert loaded(values, NAME, 9, exact=False) == b"four"


def test_a_transfer_that_fails_half_way_is_a_miss_and_keeps_the_value(
    agent: ScriptedAgent, values: NamedValues
) -> None:
    values.store([NAME], [[b"v" * 1000]])
    for end in (LABEL_BYTES - 1, LABEL_BYTES, 500, 999):
        agent.cut_off = end
        assert loaded(values, NAME, 1000) is None
    agent.cut_off = None
    assert loaded(values, NAME, 1000) == b"v" * 1000


def test_what_others_put_under_a_key_is_a_miss_and_stays(agent: ScriptedAgent, values: NamedValues) -> None:
    for found in (b"z", bytes(200), label_of(NAME, 4)):
        agent.values[stored_at(NAME)] = found
        assert loaded(values, NAME, 4) is None
        assert agent.values[stored_at(NAME)] == found


def test_a_failed_store_is_not_visible(agent: ScriptedAgent, values: NamedValues) -> None:
    values.exists([NAME])
    agent.fail(errno.EIO, errno.EIO)  # the request, then the value
    assert values.store([NAME], [[b"mine"]]) == [False]
    assert values.exists([NAME]) == [False]
    assert loaded(values, NAME, 4) is None


def test_without_an_agent_everything_is_a_miss_until_there_is_one(
    agent: ScriptedAgent, values: NamedValues
) -> None:
    assert values.store([NAME], [[b"mine"]]) == [True]
    assert values.agent_seen
    agent.kill()
    assert loaded(values, NAME, 4) is None
    assert values.store([OTHER], [[b"this"]]) == [False]
    assert not values.agent_seen
    assert values.exists([NAME]) == values.prestage([NAME]) == values.forget([NAME]) == [False]
    assert leading_hits(values.lookup_leading([NAME])) == 0
    assert values.why_unusable() is None
    agent.restart()
    values._pool.alive()
    assert loaded(values, NAME, 4) == b"mine"


def test_leading_prestage_and_forget(agent: ScriptedAgent, values: NamedValues) -> None:
    names = [name_of(at) for at in range(6)]
    values.store([*names[:3], names[4]], [[b"v"]] * 4)
    assert leading_hits(values.lookup_leading(names)) == 3
    assert values.lookup_leading([]) == []
    assert values.prestage(names[2:4]) == [True, False]
    assert agent.prestaged == [key_of_long_name(names[2])]
    assert values.forget(names[:4]) == [True, True, True, False]
    assert values.exists(names) == [False] * 4 + [True, False]


def test_time_to_live_goes_along(agent: ScriptedAgent) -> None:
    with Pool("/nowhere", files=agent) as pool:
        NamedValues(pool, "kv", ttl=1.5).store([NAME], [[b"v"]])
    assert agent.expiries[key_of_long_name(NAME)] == 2


def test_wrong_settings_are_said_at_the_start_and_once_later(
    agent: ScriptedAgent, values: NamedValues, expects_log: Callable[..., None]
) -> None:
    assert values.why_unusable((1 << 20) - LABEL_BYTES) is None
    assert "do not fit into the slots of volume 'kv'" in (values.why_unusable((1 << 20) - 63) or "")
    with Pool("/nowhere", files=agent) as pool:
        absent = NamedValues(pool, "absent")
        assert absent.why_unusable() == "the pool has no volume 'absent'"
        expects_log("volume absent of the g35 pool refuses blocks", "refuses blocks: File too large")
        expects_log("refuses blocks: a block is empty")
        for _ in range(3):
            assert absent.store([NAME], [[b"v"]]) == [False]
            assert absent.load([NAME], [[bytearray(1)]]) == [None]
            assert absent.exists([NAME]) == [False]
        assert len(absent._complaints) == 2  # the error number of a transfer, the text of a question
    assert values.store([NAME], [[bytes(1 << 20)]]) == [False]
    assert values.store([NAME, OTHER], [[], [b"v"]]) == [False, True]


def test_after_close_calls_are_misses(
    agent: ScriptedAgent, values: NamedValues, expects_log: Callable[..., None]
) -> None:
    expects_log("refuses blocks: the pool is closed")
    values._pool.close()
    assert values.load([NAME], [[bytearray(1)]]) == [None]
    assert values.store([NAME], [[b"v"]]) == [False]
    assert values.exists([NAME]) == [False]


def test_expired_values_are_misses(agent: ScriptedAgent, values: NamedValues) -> None:
    agent.causes[key_of_long_name(NAME)] = Outcome.EXPIRED
    assert loaded(values, NAME, 4) is None


class MemoryFiles(Files):
    """The operating system's calls on a file in memory, some of which move less than they were given."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.descriptor = os.memfd_create("session")
        self.most = most
        self.calls = 0

    def open(self, path: str) -> int:
        return self.descriptor

    def pwritev(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        self.calls += 1
        return os.pwrite(descriptor, b"".join(parts)[: self.most], offset)


@pytest.mark.parametrize("most", [1, 63, 64, 65, 1 << 30])
def test_parts_cross_the_session_by_one_call_however_much_it_takes(most: int) -> None:
    files = MemoryFiles(most)
    with_parts = Session("", files)
    with_parts.open()
    parts = [memoryview(bytes([at]) * (at % 3 + 1)) for at in range(100)]
    with_parts.write_parts(3, parts)
    assert files.calls == 1
    rooms = [memoryview(bytearray(len(part))) for part in parts]
    assert with_parts.read_parts(3, rooms) == sum(map(len, parts))
    assert rooms == parts
    assert os.pread(files.descriptor, 3, data_offset(3)) == b"\x00\x01\x01"
    with_parts.close()


def test_more_parts_than_a_system_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_session, "PARTS_MAX", 10)
    with_parts = Session("", MemoryFiles())
    with_parts.open()
    parts = [memoryview(bytes([at, at])) for at in range(37)]
    with_parts.write_parts(0, parts)
    rooms = [memoryview(bytearray(2)) for _ in range(40)]
    assert with_parts.read_parts(0, rooms) == 74
    assert rooms[:37] == parts
    with_parts.close()


def test_a_block_that_is_too_long_does_not_cost_the_others(
    agent: ScriptedAgent, values: NamedValues, expects_log: Callable[..., None]
) -> None:
    expects_log("refuses blocks: File too large")
    names = [name_of(at) for at in range(4)]
    blocks = [b"a", bytes(1 << 20), bytes((1 << 20) - LABEL_BYTES), b"d"]
    assert values.store(names, [[block] for block in blocks]) == [True, False, True, True]
    assert values.exists(names) == [True, False, True, True]
    assert loaded(values, names[3], 1) == b"d"
    assert agent.opens == 1


def test_a_mount_that_never_was_one_is_said_seldom(
    caplog: pytest.LogCaptureFixture, expects_log: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expects_log("no g35 pool at /proc/nowhere")
    with Pool("/proc/nowhere") as pool:
        values = NamedValues(pool, "kv")
        for _ in range(3):
            assert values.exists([NAME]) == values.store([NAME], [[b"v"]]) == [False]
            assert values.load([NAME], [[bytearray(1)]]) == [None]
            assert leading_hits(values.lookup_leading([NAME])) == 0
        assert caplog.text.count("no g35 pool at /proc/nowhere") == 1
        assert "No such file or directory" in caplog.text
        monkeypatch.setattr(named_values, "WARN_AGAIN_SECONDS", 0.0)
        values._warn_again_at = 0.0
        values.exists([NAME])
        values.exists([NAME])
        assert caplog.text.count("no g35 pool at /proc/nowhere") == 3


def test_a_volume_of_another_kind_is_said(values: NamedValues, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"name": "kv", "kind": "files", "value_bytes": 65536}
    monkeypatch.setattr(values._volume, "stats", lambda: found)
    assert "'kv' is of kind files" in (values.why_unusable(65536) or "")
