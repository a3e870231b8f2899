"""The parts of `g35 bench --tiers` that need no pool: sizes, files as blocks, and what a play says."""

from __future__ import annotations

import re
import tomllib
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from agent.bench.tiers import play as play_module
from agent.bench.tiers.folder_store import FolderStore
from agent.bench.tiers.links import Busy, Links
from agent.bench.tiers.metered_store import MeteredStore
from agent.bench.tiers.play import Played, Results, Workload, play
from agent.bench.tiers.report import LINKS, ROWS, contradictions, notes, record, table
from agent.bench.tiers.ways import DRIVES, VOLUME, WAYS, Way
from agent.config.configuration import parse_configuration
from agent.errors import UserError
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.kv.volume import room_of
from agent.pool.map.document import PoolMap, plan_pool
from agent.pool.volume.settings import LOCAL_NGUID
from agent.replay.latencies import Latencies
from agent.replay.lru import LruBaseline
from agent.replay.tally import Cause, Tally
from host_shim.control_wire import Outcome
from host_shim.pool import Fetched

KIB = 1 << 10
GOT, PUT, VALUE = 30, 20, 64 * KIB


def planned(way: Way, sets: int, value_bytes: int) -> PoolMap:
    """The pool that `g35 pool format` would make of a way's drives."""
    text = (
        '[agent]\nmount = "/mnt"\nstate = "/state"\nkey_file = "/key"\n[[enclosures]]\nname = "one"\n'
        'address = "127.0.0.1"\nnqn = "nqn.2014-08.org.nvmexpress:none"\n'
    )
    text += way.tables(value_bytes, "/nonexistent/device", 4421, Path("/nonexistent/below"))
    configuration = parse_configuration(tomllib.loads(text), "the configuration")
    wishes = [each.wish() for each in configuration.volumes]
    drives = [(uuid.uuid4().bytes, way.drive_bytes(sets, value_bytes)) for _ in range(DRIVES)]
    local = [(LOCAL_NGUID + bytes(16 - len(LOCAL_NGUID)), way.local_bytes(sets, value_bytes) - (1 << 20))]
    blocks = [] if way.is_kv_native else drives + (local if way.local_first else [])
    nobodys = RootKey(SecretKey(bytes(32)), "no key")
    return plan_pool(blocks, wishes, nobodys, drives if way.is_kv_native else [])


@pytest.mark.parametrize("value_bytes", [64 * KIB, 256 * KIB, 1024 * KIB])
@pytest.mark.parametrize("sets", [1, 4, 61])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_all_ways_have_the_same_room(way: Way, sets: int, value_bytes: int) -> None:
    volume = planned(way, sets, value_bytes).volumes[0]
    wanted = DRIVES * sets * SLOTS_PER_SET
    if way.is_kv_native:
        room = DRIVES * (way.drive_bytes(sets, value_bytes) // room_of(HEADER_BYTES + value_bytes))
        assert wanted <= room <= wanted + DRIVES
    else:
        found = sum(extent.sets for extent in volume.extents) * SLOTS_PER_SET
        assert found == wanted * way.copies
    assert volume.name == VOLUME


def test_a_file_is_a_block_that_was_stored_or_one_with_a_cause(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, direct=0)
    one, other, third = (bytes([number]) * 16 for number in range(3))
    assert store.put(one, memoryview(b"one value"))
    assert store.put(other, memoryview(b"another"))
    (tmp_path / other.hex()).unlink()
    expected = [Outcome.HIT, Outcome.EVICTED, Outcome.NEVER_STORED]
    assert store.lookup([one, other, third]) == expected
    buffers = [memoryview(bytearray(9)) for _ in range(3)]
    assert store.fetch([one, other, third], buffers) == [
        Fetched(9, Outcome.HIT),
        Fetched(None, Outcome.EVICTED),
        Fetched(None, Outcome.NEVER_STORED),
    ]
    assert bytes(buffers[0]) == b"one value"
    assert store.prestage([one]) == [False]
    assert not FolderStore(tmp_path / "gone", direct=0).put(one, memoryview(b"one"))


def test_calls_are_passed_on_and_their_processor_time_is_added_up(tmp_path: Path) -> None:
    store = MeteredStore(FolderStore(tmp_path, direct=0))
    key, data = bytes(16), memoryview(bytes(VALUE))
    assert store.put(key, data)
    after_put = store.seconds
    assert after_put > 0
    assert store.lookup([key]) == [Outcome.HIT]
    assert store.fetch([key], [memoryview(bytearray(VALUE))])[0].length == VALUE
    assert store.prestage([key]) == [False]
    assert store.seconds > after_put
    assert store.lookup_latencies.total == 1


def test_what_idle_processes_take_is_taken_away_for_as_long_as_the_turns_were() -> None:
    turns = (Busy(4.0, 2.0, 30.0) - Busy(1.0, 1.5, 20.0)) + Busy(0.5, 0.0, 2.0)
    assert turns == Busy(3.5, 0.5, 12.0)
    assert turns.beyond(Busy(0.5, 1.0, 4.0)) == Busy(2.0, 0.0, 12.0)


def test_bytes_are_counted_from_a_look_on() -> None:
    found = Links(to_host=12, to_local=3, to_g4=1).since(Links(to_host=5, to_local=1))
    assert found == Links(to_host=7, to_local=2, to_g4=1)
    assert found.bytes_written() == 3


def played(way: Way = WAYS[0]) -> Played:
    """A way whose numbers agree: 30 hits, 20 puts, and 5 misses of which one was refused a put."""
    tally = Tally(
        requests=4, blocks=GOT + PUT + 5, hits=GOT, bytes_read=GOT * VALUE, bytes_written=PUT * VALUE,
        puts=PUT + 1, puts_refused=1,
    )  # fmt: skip
    tally.misses[Cause.NEVER_STORED] = PUT
    tally.misses[Cause.BEHIND_A_HOLE] = 5
    tally.get_latencies.add(0.001)
    tally.put_latencies.add(0.002)
    below = GOT * VALUE if not way.local_first else 0
    links = Links(
        to_host=GOT * VALUE, from_host=PUT * VALUE, from_enclosures=below,
        to_enclosures=PUT * VALUE, from_local=GOT * VALUE - below, to_local=(way.copies - 1) * PUT * VALUE,
        to_g4=VALUE if way.spills else 0, drive_commands=102,
    )  # fmt: skip
    volume = {
        "bytes_read": GOT * VALUE, "bytes_written": PUT * VALUE, "puts_already_there": 0,
        "copy_bytes": links.to_local,
    }  # fmt: skip
    lookups = Latencies()
    lookups.add(0.0005)
    return Played(way, tally, lookups, 0.0102, links, Busy(0.0051), 0.01, volume, 128, 1 << 25, links.to_g4)


def results(*ways: Played, requests: int = 4) -> Results:
    lru = LruBaseline(128)
    lru.play([1, 2])
    lru.play([1, 3])
    return Results(Workload(Path("a/trace.jsonl"), 0, VALUE, 9.0), 25, 2, lru, requests, 4, 1.0, ways)


def test_the_table_has_a_cell_for_each_figure_and_each_way() -> None:
    found = record(results(*map(played, WAYS)))
    shown = table(found)
    assert [column.header for column in shown.columns] == ["", *(way.name for way in WAYS)]
    assert shown.row_count == len(ROWS)
    assert all(cell for column in shown.columns for cell in column.cells)
    first, local_first = found["ways"][0], found["ways"][3]
    assert first["hit_ratio"] == pytest.approx(30 / 55, abs=1e-6)
    assert (first["host_us"], first["agent_us"]) == (200.0, 100.0)
    assert first["bytes"]["from_local"] == 0
    assert local_first["bytes"]["from_local"] == GOT * VALUE
    assert set(first["bytes"]) == set(LINKS)
    cells = [list(column.cells) for column in shown.columns]
    assert dict(zip(cells[0], cells[1], strict=True))["drive commands, a get or put"] == "2.00"
    assert dict(zip(cells[0], cells[1], strict=True))["local device to agent"] == "-"


def test_the_notes_name_machine_trace_and_what_was_left_out() -> None:
    said = " ".join(notes(record(results(played(), requests=3))))
    assert "3 requests of trace.jsonl (of 4: the time was over) (2 broken lines skipped)" in said
    assert "25 distinct blocks of 64 KiB" in said
    assert "An LRU of 128 blocks: 0.250" in said
    assert record(results(played()))["machine"]["python"] in said
    assert "time was over" not in " ".join(notes(record(results(played()))))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_numbers_that_agree_have_no_contradiction(way: Way) -> None:
    assert contradictions(results(played(way))) == []


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            {
                "volume": {
                    "bytes_read": 1,
                    "bytes_written": PUT * VALUE,
                    "puts_already_there": 0,
                    "copy_bytes": 0,
                }
            },
            "were got",
        ),
        (
            {
                "volume": {
                    "bytes_read": GOT * VALUE,
                    "bytes_written": 1,
                    "puts_already_there": 0,
                    "copy_bytes": 0,
                }
            },
            "were put",
        ),
        ({"links": Links()}, "went to the host"),
        ({"links": replace(played().links, from_host=VALUE)}, "went from the host"),
        ({"links": replace(played().links, from_enclosures=VALUE)}, "went from flash and G4"),
        ({"links": replace(played().links, to_enclosures=VALUE)}, "went to flash"),
        ({"links": replace(played().links, from_local=1)}, "the way has none"),
        ({"links": replace(played().links, to_g4=7)}, "and 0 lie there"),
        ({"tally": Tally(wrong_bytes=3, wrong_blocks=1)}, "3 wrong bytes were served, in 1 blocks"),
        ({"tally": Tally(blocks=1)}, "do not add up"),
    ],
)
def test_what_contradicts_is_said_with_its_way(what: dict[str, object], said: str) -> None:
    found = contradictions(results(replace(played(), **what)))  # type: ignore[arg-type]
    assert any(line.startswith("files: ") and said in line for line in found)


def test_two_copies_are_twice_the_bytes_to_flash() -> None:
    once = played(WAYS[3])
    less = replace(once, links=replace(once.links, to_local=once.links.to_local - VALUE))
    assert "fewer than the" in contradictions(results(less))[0]


def test_a_trace_without_blocks_and_a_machine_without_room_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("no request\n")
    workload = Workload(trace, 0, VALUE, 1.0)

    def never(what: str, part: float) -> None:
        raise AssertionError(f"{what} is begun")

    with pytest.raises(UserError, match="has no blocks to play"):
        play(workload, tmp_path, never)
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": [1, 2]}\n')
    monkeypatch.setattr(play_module, "available_memory", lambda: 1 << 20)
    with pytest.raises(UserError, match="of memory for their drives, and 1 MiB are free") as refused:
        play(workload, tmp_path, never)
    assert "--value-size" in refused.value.advice
    monkeypatch.setattr(play_module, "available_memory", lambda: 1 << 50)
    monkeypatch.setattr(play_module, "free_bytes", lambda folder: 5)
    with pytest.raises(UserError, match="for G4, and 5 B are free"):
        play(workload, tmp_path, never)


def test_the_page_shows_a_table_that_the_command_prints(repository: Path) -> None:
    page = (repository / "docs/tiers.md").read_text()
    (shown,) = re.findall(r"^```text\n(g35 bench --tiers *\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    head, _rule, *lines = shown.splitlines()[1:]
    assert re.split(r" {2,}", head.strip()) == [way.name for way in WAYS]
    rows = [re.split(r" {2,}", line) for line in lines[: len(ROWS)]]
    assert [row[0] for row in rows] == [words for words, _cell in ROWS]
    assert all(len(row) == 1 + len(WAYS) for row in rows)
