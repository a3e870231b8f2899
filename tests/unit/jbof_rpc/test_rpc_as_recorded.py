"""The enclosure's RPC against what a real SPDK target answered to the same (tests/vectors/spdk_rpc.json)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from emulator.jbof.rpc.dispatch import Dispatcher
from emulator.jbof.rpc.json_stream import JsonStream

RECORDED = json.loads((Path(__file__).parents[2] / "vectors" / "spdk_rpc.json").read_text())
KNOWN = "nqn.2026-01.io.g35:known"


@pytest.fixture
def bare() -> Iterator[Dispatcher]:
    with Enclosure(EnclosureSettings(bare=True)) as enclosure:
        yield Dispatcher(enclosure)


def call(dispatcher: Dispatcher, method: str, params: dict[str, Any] | None = None) -> Any:
    said = dispatcher.answer({"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}})
    assert isinstance(said, dict)
    return said["result"] if "result" in said else said["error"]


@pytest.fixture
def known(bare: Dispatcher) -> Dispatcher:
    """With a transport, a bdev, a subsystem, a namespace and a host."""
    call(bare, "nvmf_create_transport", {"trtype": "TCP"})
    assert call(bare, "bdev_malloc_create", {"block_size": 4096, "num_blocks": 8}) == "Malloc0"
    assert call(bare, "nvmf_create_subsystem", {"nqn": KNOWN}) is True
    space = {
        "bdev_name": "Malloc0", "nsid": 1, "nguid": "0F1E2D3C4B5A69788796A5B4C3D2E1F0",
        "uuid": "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0",
    }  # fmt: skip
    assert call(bare, "nvmf_subsystem_add_ns", {"nqn": KNOWN, "namespace": space}) == 1
    assert call(bare, "nvmf_subsystem_add_host", {"nqn": KNOWN, "host": "nqn.2026-01.io.g35:host"}) is True
    return bare


@pytest.mark.parametrize("exchange", RECORDED["framing"], ids=lambda each: each["sent"][:60])
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_framing(bare: Dispatcher, exchange: dict[str, str], step: int) -> None:
    stream, said = JsonStream(), ""
    sent = exchange["sent"].encode()
    for start in range(0, len(sent), step):
        for request in stream.push(sent[start : start + step]):
            answer = bare.answer(request)
            if answer is not None:
                said += json.dumps(answer, separators=(",", ":")) + "\n"
    assert said == exchange["answer"]


@pytest.mark.parametrize(
    "refusal",
    [each for each in RECORDED["refusals"] if "needs" not in each],
    ids=lambda each: f"{each['method']}-{json.dumps(each['params'])[:60]}",
)
def test_refusals(known: Dispatcher, refusal: dict[str, Any]) -> None:
    before = call(known, "nvmf_get_subsystems"), call(known, "bdev_get_bdevs")
    said = call(known, refusal["method"], refusal["params"])
    assert said == {"code": refusal["code"], "message": refusal["message"]}
    assert (call(known, "nvmf_get_subsystems"), call(known, "bdev_get_bdevs")) == before


def test_what_belongs_before_the_start_is_refused_as_such(bare: Dispatcher) -> None:
    said = call(bare, "nvmf_set_config", {"dhchap_digests": ["sha256"]})
    assert said["code"] == -1
    assert said["message"].startswith("Method may only be called before framework is initialized")


def shape(value: Any) -> Any:
    """The names of an answer, whatever their values."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return type(value).__name__


def test_listings_have_the_shape_of_the_recorded_ones(known: Dispatcher) -> None:
    recorded = json.loads(json.dumps(RECORDED["nvmf_get_subsystems"]))
    recorded[1]["listen_addresses"] = []
    recorded[1]["hosts"] = [{"nqn": "a host without keys"}]
    assert shape(call(known, "nvmf_get_subsystems")) == shape(recorded)
    [namespace] = call(known, "nvmf_get_subsystems", {"nqn": KNOWN})[0]["namespaces"]
    assert namespace == RECORDED["nvmf_get_subsystems"][1]["namespaces"][0]
    counters = call(known, "bdev_get_iostat", {"names": ["Malloc0"]})
    assert counters.keys() == RECORDED["bdev_get_iostat"].keys()
    missing = {"max_read_latency_ticks", "min_read_latency_ticks", "max_write_latency_ticks"}
    missing.add("min_write_latency_ticks")
    assert counters["bdevs"][0].keys() == RECORDED["bdev_get_iostat"]["bdevs"][0].keys() - missing


def test_the_methods_are_those_of_the_document(bare: Dispatcher, repository: Path) -> None:
    page = (repository / "docs/enclosures.md").read_text()
    table = page.partition("These methods are answered")[2].partition("Everything else")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == call(bare, "rpc_get_methods")


def test_a_bdev_that_goes_takes_its_namespaces_along(known: Dispatcher) -> None:
    assert call(known, "bdev_malloc_delete", {"name": "Malloc0"}) is True
    assert call(known, "nvmf_get_subsystems", {"nqn": KNOWN})[0]["namespaces"] == []
    assert call(known, "bdev_get_bdevs") == []
    assert call(known, "bdev_malloc_create", {"block_size": 512, "num_blocks": 8}) == "Malloc0"


def test_a_namespace_without_names_has_that_of_its_bdev_every_time(known: Dispatcher) -> None:
    [bdev] = call(known, "bdev_get_bdevs", {"name": "Malloc0"})
    taken = call(known, "nvmf_subsystem_add_ns", {"nqn": KNOWN, "namespace": {"bdev_name": "Malloc0"}})
    assert taken["code"] == -32602, "a namespace claims its bdev"
    assert call(known, "nvmf_subsystem_remove_ns", {"nqn": KNOWN, "nsid": 1})
    assert call(known, "nvmf_subsystem_add_ns", {"nqn": KNOWN, "namespace": {"bdev_name": "Malloc0"}}) == 1
    namespace = call(known, "nvmf_get_subsystems", {"nqn": KNOWN})[0]["namespaces"][0]
    assert namespace["uuid"] == bdev["uuid"]
    assert namespace["nguid"] == bdev["uuid"].replace("-", "").upper()
    with Enclosure(EnclosureSettings(bare=True)) as another:
        again = Dispatcher(another)
        call(again, "bdev_malloc_create", {"name": "Malloc0", "block_size": 512, "num_blocks": 8})
        assert call(again, "bdev_get_bdevs")[0]["uuid"] == bdev["uuid"]


def test_what_cannot_be_done_is_refused_and_not_passed_over(known: Dispatcher) -> None:
    for method, params in (
        ("bdev_malloc_create", {"block_size": 4096, "num_blocks": 8, "md_size": 8}),
        ("bdev_malloc_create", {"block_size": 520, "num_blocks": 8}),
        ("bdev_get_iostat", {"per_channel": True}),
        ("nvmf_create_transport", {"trtype": "RDMA", "max_io_size": 8192}),  # TCP has another already
        ("nvmf_subsystem_add_ns", {"nqn": KNOWN, "namespace": {"bdev_name": "Malloc0", "eui64": "0" * 16}}),
        ("nvmf_subsystem_add_ns", {"nqn": KNOWN, "namespace": {"bdev_name": "Malloc0", "nsid": 33}}),
    ):
        assert call(known, method, params)["code"] < 0


def test_an_enclosure_with_drives_shows_them_and_can_be_added_to() -> None:
    settings = EnclosureSettings(drives=2, drive_bytes=1 << 20, allowed_hosts=frozenset({"nqn.one"}))
    enclosure = Enclosure(settings)  # not started: nothing listens in a unit test
    try:
        dispatcher = Dispatcher(enclosure)
        assert [each["name"] for each in call(dispatcher, "bdev_get_bdevs")] == ["drive-0", "drive-1"]
        [_, shown] = call(dispatcher, "nvmf_get_subsystems")
        assert [each["bdev_name"] for each in shown["namespaces"]] == ["drive-0", "drive-1"]
        assert shown["hosts"] == [{"nqn": "nqn.one"}]
        call(dispatcher, "bdev_malloc_create", {"block_size": 4096, "num_blocks": 8})
        assert call(
            dispatcher, "nvmf_subsystem_add_ns", {"nqn": shown["nqn"], "namespace": {"bdev_name": "Malloc0"}}
        ) == 3  # fmt: skip
        assert enclosure.stats()["drives"][2]["attached"]
        enclosure.remove_drive(2)
        enclosure.add_drive(2)
        [_, shown] = call(dispatcher, "nvmf_get_subsystems")
        assert shown["namespaces"][2]["bdev_name"] == "Malloc0"
        assert call(dispatcher, "bdev_malloc_delete", {"name": "drive-1"}) is True
        assert [drive.number for drive in enclosure.drives] == [0, 2]
    finally:
        enclosure.close()
