"""Requests to the control socket, without the socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from emulator.jbof.cli import _need, app
from emulator.jbof.control import ControlServer, answer
from emulator.jbof.control_requests import VERBS, RequestError, decode_request_untrusted, parse_status
from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from emulator.jbof.faults import DriveFaults
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


def test_the_link_is_shared_by_all_drives(enclosure: Enclosure) -> None:
    one, two = enclosure.drives
    assert ask(enclosure, verb="link", bandwidth_mib_s=1) == {"ok": True}
    assert one.admit(Operation.READ, 0, SIZE // 2, 10.0) == 10.5
    assert two.admit(Operation.READ, 0, SIZE // 2, 10.0) == 11.0
    assert two.admit(Operation.WRITE, 0, SIZE // 2, 10.0) == 10.5, "the other way"
    assert one.admit(Operation.FLUSH, 0, 0, 10.0) == 10.0
    ask(enclosure, verb="model", drive=0, bandwidth_mib_s=0.25)
    assert one.admit(Operation.READ, 0, SIZE // 2, 20.0) == 22.0, "the slower of drive and link"
    ask(enclosure, verb="link")
    assert two.admit(Operation.READ, 0, SIZE, 30.0) == 30.0
    assert "bandwidth_mib_s" in ask(enclosure, verb="link", bandwidth_mib_s=-1)["error"]


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


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"verb": "haeal"}, "'heal', 'port', 'access', 'kill' (did you mean heal?)"),
        ({"verb": "error", "status": "write_falt"}, "(did you mean write_fault?); a number (0x281)"),
        ({"verb": "error", "status": 1, "operations": ["wriet"]}, "'wriet' is not one of 'read', 'write', "),
        ({"verb": "access", "number": 1, "state": "optimised"}, "'change' (did you mean optimized?)"),
        ({"verb": "access", "number": 1, "state": "OPTIMIZED"}, "'change' (did you mean optimized?)"),
        ({"verb": "slow", "latency_ms": -1}, "latency_ms: should be greater than or equal to 0"),
    ],
)
def test_a_wrong_word_is_told_the_known_ones_and_the_nearest(
    enclosure: Enclosure, request_: Any, said: str
) -> None:
    assert said in answer(enclosure, json.dumps(request_).encode())[0]["error"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--media", "file"], "Invalid value for '--media': 'file' is not one of 'files', 'memory' (did you"),
        (["fault", "error", "--status", "write_falt"], "(did you mean write_fault?)"),
        (["fault", "error", "--status", "1", "--operation", "raed"], "(did you mean read?)"),
        (["fault", "access", "--number", "1", "--state", "chnge"], "'change' (did you mean change?)"),
        (["fault", "model", "--jitter", "3"], "jitter: should be less than or equal to 1"),
    ],
)
def test_the_command_line_tells_them_too(words: list[str], said: str, tmp_path: Path) -> None:
    control = ["--control", str(tmp_path / "none")]
    done = CliRunner().invoke(app, words + control * (words[0] == "fault"), env={"COLUMNS": "2000"})
    assert done.exit_code == 2
    assert said in done.output
    assert "Value error" not in done.output


def test_every_verb_of_the_socket_is_one_of_the_command_line(enclosure: Enclosure, tmp_path: Path) -> None:
    """Each with all its options: a field of a request is an option."""
    given = {
        "slow": ["--latency-ms", "5"], "error": ["--status", "0x281", "--operation", "read"],
        "flip": ["--drive", "0", "--offset", "4K", "--length", "1", "--no-on-read"],
        "zero": ["--drive", "0", "--offset", "0", "--length", "4K"],
        "copy": ["--drive", "0", "--source", "0", "--offset", "4K", "--length", "512"],
        "model": ["--iops", "10"], "remove": ["--drive", "1"], "link": ["--bandwidth-mib-s", "9"],
        "add": ["--drive", "1"],
        "port": ["--number", "1", "--up"], "access": ["--number", "1", "--state", "non-optimized"],
    }  # fmt: skip
    control = ControlServer(enclosure, tmp_path / "control")
    try:
        for verb in VERBS:
            if verb != "kill":
                words = ["stats"] if verb == "stats" else ["fault", verb, *given.get(verb, [])]
                done = CliRunner().invoke(app, [*words, "--control", str(control.path)])
                refused = "there are 0 ports" in done.output
                assert done.exit_code == (1 if refused else 0), done.output
    finally:
        control.close()
    assert enclosure.drive(0).faults == DriveFaults(enclosure.drive(0).faults.chance), "heal comes last"


def test_the_need_of_an_enclosure_is_that_of_the_document(repository: Path) -> None:
    one = _need(EnclosureSettings(folder=Path("/nowhere")))
    said = f"{one.files - 1}, and one for each drive: {one.files} with one"
    assert f"| 768 MiB | {said}" in (repository / "docs" / "operating.md").read_text()
    assert _need(EnclosureSettings(drives=1, kv_drives=1)).files == one.files + 1


def test_kill_is_answered_first(enclosure: Enclosure) -> None:
    assert answer(enclosure, b'{"verb": "kill"}') == ({"ok": True}, True)


def test_statuses_have_names() -> None:
    assert parse_status("write_fault") == Status.WRITE_FAULT
    assert parse_status("write-fault") == Status.WRITE_FAULT
    assert parse_status("0x281") == 0x281
    assert parse_status(7) == 7
