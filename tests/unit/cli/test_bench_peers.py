"""Other stores beside ours: which names there are, what a client of theirs answers, what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.bench import records, sites
from agent.bench.names_and_units import CATALOG, PEERS, PEERS_ASKED, RATE, chosen, unknown
from agent.bench.peers.lines import Lane, PeerFailed, Sized, Talk
from agent.bench.records import Figure
from agent.bench.redis_site import NotHere
from agent.bench.rounds import Sample, details
from agent.bench.run_bench import Wishes, run

SIZE = 4096


class DictStore:
    """A store that is a dictionary; what it returns for `spoilt` names is one bit off."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.spoilt: set[str] = set()
        self.made = 0

    def new_buffer(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def made_ready(self, value: memoryview) -> bytes:
        self.made += 1
        return bytes(value)

    def done_with(self, ready: Any) -> None:
        self.made -= 1

    def lane(self, value_bytes: int) -> Lane:
        return DictLane(self)

    def close(self) -> None:
        pass


class DictLane:
    def __init__(self, store: DictStore) -> None:
        self._store = store

    def get(self, name: str) -> memoryview:
        if name not in self._store.values:
            raise PeerFailed(f"no {name}")
        value = bytearray(self._store.values[name])
        value[-1] ^= name in self._store.spoilt
        return memoryview(value)

    def put(self, name: str, value: bytes) -> None:
        self._store.values[name] = value

    def remove(self, name: str) -> None:
        del self._store.values[name]


def asked(do: str, in_flight: int = 1, seconds: float = 0.01) -> dict[str, Any]:
    return {
        "do": do, "bytes": SIZE, "values": 8, "puts": 6, "in_flight": in_flight, "seconds": seconds
    }  # fmt: skip


@pytest.mark.parametrize("in_flight", [1, 4])
def test_values_are_stored_got_and_put(in_flight: int) -> None:
    store = DictStore()
    talk = Talk(store)
    assert talk.answer_to(asked("prepare")) == {"prepared": SIZE}
    stored = dict(store.values)
    assert len(stored) == 8
    assert len(set(stored.values())) == 8
    for do in ("get", "put"):
        answer = talk.answer_to(asked(do, in_flight))
        assert answer["operations"] == len(answer["latencies"]) > 0
        assert answer["bytes"] == answer["operations"] * SIZE
        assert answer["seconds"] > 0
    assert store.values == stored  # what was put is gone again
    assert talk.answer_to(asked("prepare")) == {"prepared": SIZE}
    assert store.made == 16  # what is put again and again; the rest was done with


def test_a_wrong_byte_is_no_figure() -> None:
    store = DictStore()
    sized = Sized(store, SIZE, 1, 4)
    store.spoilt.add(next(iter(store.values)))
    with pytest.raises(PeerFailed, match="wrong bytes in value 0"):
        sized.get(1, 0.001)
    with pytest.raises(PeerFailed, match="did not come back"):
        Sized(store, SIZE, 1, 4)
    store.spoilt = {f"put-{SIZE}-0"}
    with pytest.raises(PeerFailed, match="did not come back"):
        sized.put(1, 0.001)


def test_a_value_of_another_length_is_no_figure() -> None:
    store = DictStore()
    sized = Sized(store, SIZE, 1, 4)
    store.values = {name: value[1:] for name, value in store.values.items()}
    with pytest.raises(PeerFailed, match="another length"):
        sized.get(1, 0.001)


def test_the_names_that_scripts_use_are_measured_by_default() -> None:
    default = {entry.name for entry in chosen([])}
    assert set(PEERS_ASKED) <= default
    assert {"kv_get_1m_x4", "kv_get_4m_x4", "mooncake_get_1m_x4", "mooncake_get_4m_x4"} <= PEERS_ASKED
    assert {"lm_get_1m_x4", "redis_get_1m_x4", "redis_tls_get_1m_x4"} <= PEERS_ASKED
    assert "shim_loop_block_ms" in default
    assert "mooncake_put_4m_x1" not in default


def test_the_others_by_their_names_or_a_pattern() -> None:
    assert [entry.name for entry in chosen(["lm_put_4m_x1"])] == ["raw_tcp_4m", "lm_put_4m_x1"]
    beside = {entry.name for entry in chosen(["*_x1", "*_x4"])}
    assert {f"{peer}_put_64k_x{count}" for peer in PEERS for count in (1, 4)} <= beside
    assert unknown(["lm_*_x4", "lm_*_x3", "nothing"]) == ["lm_*_x3", "nothing"]
    for name in beside:
        assert CATALOG[name].unit == RATE
        if "_x" in name:
            assert CATALOG[name].in_flight == int(name[-1])
            assert CATALOG[name].tls == name.startswith("redis_tls")


@pytest.mark.parametrize(
    ("name", "engine"), [("mooncake_get_1m_x4", "mooncake"), ("lm_get_1m_x4", "lmcache")]
)
def test_without_its_environment_a_name_is_left_out_with_its_reason(
    name: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sites, "ENVIRONMENTS", tmp_path / "engines")
    (tmp_path / "run").mkdir()
    results = run(Wishes([CATALOG[name]], 0.1, None, 1), tmp_path / "run", lambda what, part: None)
    assert results.left_out == {name: f"its client is not installed: make engines ENGINES={engine}"}
    assert not results.figures
    assert not results.troubles


def test_a_half_made_environment_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "ENVIRONMENTS", tmp_path)
    python = tmp_path / "mooncake" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    with pytest.raises(NotHere):
        sites.interpreter("mooncake")
    (tmp_path / "mooncake" / ".g35-engine").touch()
    assert sites.interpreter("mooncake") == python


def test_percentiles_of_all_rounds() -> None:
    rounds = [
        Sample(1.0, 50, 1, 1.0, tuple(n / 1e3 for n in range(50, 0, -1))),
        Sample(1.0, 50, 1, 1.0, tuple(n / 1e3 for n in range(51, 101))),
    ]
    found = details(rounds)
    assert (found["p50_ms"], found["p99_ms"]) == (50.0, 99.0)
    assert "p50_ms" not in details([Sample(1.0, 1, 1, 1.0)])


def test_the_table_has_a_row_for_each_kind_of_work_and_a_column_for_each_store() -> None:
    names = ("kv_get_1m_x4", "lm_get_1m_x4", "kv_put_64k_x1")
    figures = {
        name: Figure(CATALOG[name], value, {"p50_ms": 1.25, "p99_ms": 2.5})
        for name, value in zip(names, (2.0, 0.5, 0.25), strict=True)
    }
    table = records.beside_peers(figures)
    assert table is not None
    assert [column.header for column in table.columns] == ["GiB/s (p50, p99 ms)", "kv", "lm"]
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["get 1m, 4 in flight"]  # of the put there is nothing beside ours
    assert cells[1] == ["2.00 (1.25, 2.50)"]
    assert cells[2] == ["0.50 (1.25, 2.50)"]
    assert records.beside_peers({"kv_put_64k_x1": figures["kv_put_64k_x1"]}) is None
