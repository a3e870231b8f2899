"""Requests to the control socket, without the socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from emulator.jbof.control import answer
from emulator.jbof.control_requests import RequestError, decode_request_untrusted, parse_status
from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from nvmeof.controller.storage import Operation
from nvmeof.wire.status import Status

SIZE = 1 << 20


@pytest.fixture
def enclosure() -> Iterator[Enclosure]:
    made = Enclosure(EnclosureSettings(drives=2, drive_bytes=SIZE))
    yield made
    made.close()


def ask(enclosure: Enclosure, **request: Any) -> dict[str, Any]:
    reply, kill = answer(enclosure, json.dumps(request).encode())
    assert not kill
    json.dumps(reply)
    return reply


def test_faults_are_set_and_healed(enclosure: Enclosure) -> None:
    one, two = enclosure.drives
    assert ask(enclosure, verb="slow", drive=0, latency_ms=200) == {"ok": True, "drives": [0]}
    assert (one.faults.extra_latency_s, two.faults.extra_latency_s) == (0.2, 0.0)
    assert ask(enclosure, verb="hang")["drives"] == [0, 1]
    assert one.faults.hung
    assert two.faults.hung
    ask(enclosure, verb="full", drive=1)
    ask(enclosure, verb="lose-writes", drive=1, probability=0.25)
    ask(enclosure, verb="error", drive=1, status="write_fault", operations=["write"], probability=0.5)
    ask(enclosure, verb="flip", drive=1, on_read=True, offset=4096, length=10, bits=2)
    faults = ask(enclosure, verb="stats")["drives"][1]["faults"]
    assert faults == {
        "hung": True,
        "full": True,
        "slow_ms": 0.0,
        "lose_writes": 0.25,
        "error": {"status": 0x280, "probability": 0.5, "operations": ["write"], "do_not_retry": False},
        "flip_on_read": {"offset": 4096, "length": 10, "probability": 1.0, "bits": 2},
    }
    ask(enclosure, verb="heal", drive=1)
    assert not two.faults.any_active
    assert one.faults.any_active
    ask(enclosure, verb="heal")
    assert not one.faults.any_active


def test_damage_and_drives(enclosure: Enclosure) -> None:
    reply = ask(enclosure, verb="flip", drive=0, offset=100, length=1, bits=3)
    assert reply == {"ok": True, "bytes_changed": [100]}
    assert ask(enclosure, verb="zero", drive=0, offset=0, length=SIZE) == {"ok": True}
    assert ask(enclosure, verb="copy", drive=0, source=0, offset=4096, length=4096) == {"ok": True}
    assert ask(enclosure, verb="remove", drive=0) == {"ok": True}
    assert not ask(enclosure, verb="stats")["drives"][0]["attached"]
    assert ask(enclosure, verb="add", drive=0)["nsid"] == 1
    added = ask(enclosure, verb="add", size=2 * SIZE)
    assert (added["drive"], added["nsid"]) == (2, 3)
    assert ask(enclosure, verb="model", drive=0, read_latency_ms=1, iops=10)["ok"]
    assert enclosure.drive(0).admit(Operation.READ, 0, 4096, 0.0) == pytest.approx(0.101)


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        ({"verb": "slow", "drive": 9, "latency_ms": 1}, "no drive 9"),
        ({"verb": "remove", "drive": 9}, "no drive 9"),
        ({"verb": "slow", "drive": 0}, "latency_ms"),
        ({"verb": "slow", "drive": -1, "latency_ms": 1}, "drive"),
        ({"verb": "slow", "drive": 0, "latency_ms": -1}, "latency_ms"),
        ({"verb": "hang", "drives": 0}, "drives"),
        ({"verb": "explode"}, "explode"),
        ({"verb": "error", "drive": 0, "status": "nonsense"}, "write_fault"),
        ({"verb": "error", "drive": 0, "status": 0}, "status"),
        ({"verb": "error", "drive": 0, "status": 1, "operations": ["fly"]}, "operations"),
        ({"verb": "flip", "drive": 0, "offset": SIZE}, "not in a drive"),
        ({"verb": "zero", "drive": 0, "offset": SIZE - 1, "length": 2}, "not in a drive"),
        ({"verb": "add", "drive": 0}, "there already"),
        ({"verb": "add", "size": 100}, "whole number"),
        ([], ""),
        ("stats", ""),
    ],
)
def test_requests_that_are_wrong(enclosure: Enclosure, request_: Any, part: str) -> None:
    reply, kill = answer(enclosure, json.dumps(request_).encode())
    assert not kill
    assert not reply["ok"]
    assert part in reply["error"]
    assert ask(enclosure, verb="stats")["ok"]


@pytest.mark.parametrize("line", [b"", b"\n", b"{", b"\xff\xfe", b"[" * 5000, b'{"verb": NaN}'])
def test_lines_that_are_no_requests(line: bytes) -> None:
    with pytest.raises(RequestError):
        decode_request_untrusted(line)


def test_kill_is_answered_first(enclosure: Enclosure) -> None:
    assert answer(enclosure, b'{"verb": "kill"}') == ({"ok": True}, True)


def test_statuses_have_names() -> None:
    assert parse_status("write_fault") == Status.WRITE_FAULT
    assert parse_status("write-fault") == Status.WRITE_FAULT
    assert parse_status("0x281") == 0x281
    assert parse_status(7) == 7
