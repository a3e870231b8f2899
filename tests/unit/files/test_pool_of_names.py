"""Names of /fs belong to the pool that has their blocks, and to its volumes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from agent.fs.files.block_store import StoreUnavailable
from agent.fs.files.face import FilesFace
from agent.fs.files.metadata_pool import FACT, NamesElsewhere, PoolOfNames, names_another, noted_home
from agent.fs.files.options import FilesOptions
from agent.fs.files.pool_store import PoolBlockStore, store_for
from agent.pool.volume.volume import Volume
from tests.support.fs.files_calls import FaceCalls
from tests.support.pool.inline_runner import InlineRunner
from tests.support.pool.memory_blocks import MemoryBlockStore
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import PoolAgent, volume_settings

HERE, ELSEWHERE = PoolOfNames("aa" * 16, {512: "01" * 16}), PoolOfNames("bb" * 16, {512: "02" * 16})


class Machine:
    """A metadata file, and two pools that its agent may find."""

    def __init__(self, folder: Path) -> None:
        self.metadata = folder / "files.sqlite"
        self.stores = {home.pool_id: MemoryBlockStore((512,)) for home in (HERE, ELSEWHERE)}
        self._face: FilesFace | None = None

    def start(self, home: PoolOfNames | None) -> FaceCalls:
        self.stop()
        store = self.stores[home.pool_id if home is not None else HERE.pool_id]
        self._face = FilesFace(self.metadata, store, FilesOptions(cache_seconds=0), home=home)
        return FaceCalls(self._face, InlineRunner())

    def stop(self) -> None:
        if self._face is not None:
            self._face.close()
            self._face = None

    def rows(self) -> list[str]:
        """All that the metadata says."""
        self.stop()
        with closing(sqlite3.connect(self.metadata)) as connection:
            return list(connection.iterdump())

    def note(self, text: str | None) -> None:
        self.stop()
        with closing(sqlite3.connect(self.metadata)) as connection, connection:
            connection.execute("DELETE FROM facts WHERE name = ?", (FACT,))
            if text is not None:
                connection.execute("INSERT INTO facts VALUES (?, ?)", (FACT, text))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.stop()


def test_names_that_meet_another_pool_are_left_alone(machine: Machine) -> None:
    """Their blocks are not there, which is no loss: the pool may come back, and does here."""
    files = {f"file-{number}": bytes([number]) * 900 for number in range(5)}
    calls = machine.start(HERE)
    for name, data in files.items():
        calls.put(name, data)
    before = machine.rows()
    for _ in range(2):
        with pytest.raises(
            NamesElsewhere, match=f"names blocks of pool {'aa' * 16}, and this is pool bb"
        ) as said:
            machine.start(ELSEWHERE)
        assert "bring back what is missing" in said.value.advice
    assert machine.rows() == before
    assert names_another(machine.metadata, ELSEWHERE.pool_id)
    assert not names_another(machine.metadata, HERE.pool_id)
    calls = machine.start(HERE)
    assert {name: calls.get(name) for name in calls.listdir("")} == files
    assert not machine.stores[ELSEWHERE.pool_id].gets


def test_a_file_system_that_holds_nothing_goes_with_the_pool_that_is_there(machine: Machine) -> None:
    machine.start(HERE)
    assert not names_another(machine.metadata, ELSEWHERE.pool_id)
    calls = machine.start(ELSEWHERE)
    calls.put("file", b"x")
    calls.unlink("file")
    with pytest.raises(NamesElsewhere):  # the block is to be deleted yet, and not in another pool
        machine.start(HERE)
    calls = machine.start(ELSEWHERE)
    while calls.do(lambda: calls.face.collect()):
        pass
    machine.start(HERE).mkdir("folder")
    assert noted_home(machine.metadata) == HERE
    with pytest.raises(NamesElsewhere):
        machine.start(ELSEWHERE)


@pytest.mark.parametrize("note", [None, "", "[]", '{"pool_id": 1}', '{"pool_id": "x", "volumes": [1]}'])
def test_names_of_nobody_knows_where_are_left_alone(machine: Machine, note: str | None) -> None:
    """Those of before there were notes, too: pools of that time are not served any more."""
    machine.start(None).put("file", b"x")
    machine.note(note)
    assert noted_home(machine.metadata) == PoolOfNames()
    before = machine.rows()
    with pytest.raises(NamesElsewhere, match="a pool that it does not note"):
        machine.start(HERE)
    assert machine.rows() == before


def test_names_of_blocks_that_no_volume_holds_are_left_alone(tmp_path: Path) -> None:
    """The tenant of the volume was erased. /kv goes on, and so do files whose volumes are there."""
    metadata, options = tmp_path / "files.sqlite", FilesOptions(cache_seconds=0)
    face = FilesFace(metadata, MemoryBlockStore((512, 2048)), options, home=HERE)
    FaceCalls(face, InlineRunner()).put("file", bytes(2000))
    face.close()
    with pytest.raises(NamesElsewhere, match="names blocks of 2048 bytes"):
        FilesFace(metadata, MemoryBlockStore((512,)), options, home=HERE)
    face = FilesFace(metadata, MemoryBlockStore((512, 2048)), options, home=HERE)
    assert FaceCalls(face, InlineRunner()).listdir("") == ["file"]
    face.close()

    store = PoolBlockStore([PoolAgent([], volume_settings((1,))).volume], lambda: MemoryChannel([]))
    for steps in (store.get(bytes(16), 512, 0, memoryview(bytearray(9))), store.delete(bytes(16), 512)):
        with pytest.raises(StoreUnavailable, match="no volume for 512 bytes"):
            InlineRunner().run(steps)


def test_a_note_is_read_of_what_is_there_only(tmp_path: Path) -> None:
    missing, foreign = tmp_path / "missing", tmp_path / "foreign"
    foreign.write_bytes(b"not a database at all" * 100)
    assert noted_home(missing) == noted_home(foreign) == PoolOfNames()
    assert not names_another(missing, "aa" * 16)
    assert not missing.exists()


def test_names_go_on_with_the_volume_that_has_their_blocks(tmp_path: Path) -> None:
    """A tenant that is added later brings volumes of the same capacity; one that was erased takes its own."""
    metadata, channel = tmp_path / "files.sqlite", MemoryChannel([MemoryNamespace(1 << 24)])

    def volume(number: int, value_bytes: int = 16384) -> Volume:
        settings = volume_settings((1,), value_bytes=value_bytes, volume_id=bytes([number]) * 16)
        return PoolAgent([], replace(settings, kind="files")).volume

    def served(*volumes: Volume) -> dict[int, int]:
        """The volumes that are used, by the first byte of their ids."""
        store, home = store_for(metadata, "aa" * 16, volumes, lambda: channel)
        FilesFace(metadata, store, home=home).close()
        assert store.capacities == tuple(sorted(home.volumes))
        return {size: bytes.fromhex(name)[0] for size, name in home.volumes.items()}

    assert served(volume(1), volume(2), volume(3, 32768)) == {16384: 1, 32768: 3}
    for order in ((2, 1), (1, 2)):
        assert served(*map(volume, order), volume(3, 32768), volume(4, 32768)) == {16384: 1, 32768: 3}
    assert served(volume(1)) == {16384: 1}
    assert served(volume(4, 32768), volume(3, 32768), volume(2)) == {16384: 2, 32768: 3}
    assert served(volume(1), volume(2)) == {16384: 2}
