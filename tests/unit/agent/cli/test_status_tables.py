"""`g35 status` on a narrow terminal: nothing is cut off."""

from __future__ import annotations

import errno
import io
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent.cli import status_document, status_verb
from agent.cli.status_verb import health_that_fits, tables
from agent.cli.top_screen import Scroll, fitted
from agent.cli.up import layout
from agent.cli.up.layout import Layout, Running
from agent.errors import G35Error
from agent.pool.counters import MissCause

LARGE = 987_654_321_098
NAME = "n" * 60 + "-end"


def snapshot() -> dict[str, Any]:
    """A snapshot in which everything is as long as it may get."""
    causes = {cause.name.lower(): LARGE + cause.value for cause in MissCause}
    return {
        "uptime_s": 1e7,
        "mount": "/mnt/" + "m" * 60,
        "pool": {
            "id": "0123456789abcdef" * 2, "namespaces": 4096, "namespaces_away": 17,
            "newcomers": {f"{number:032x}": NAME for number in range(30)},
            "newcomers_refused": {"f" * 32: "it carries a pool"}, "waiting_for": "the pool to be settled",
            "contested": {"e" * 32: f"{NAME} shows it as well"}, "volumes_unsettled": [NAME],
            "moves_values": LARGE + 28, "moves_left": None,
        },
        "totals": {
            "bytes_read": 1 << 60, "bytes_written": 1 << 59, "hit_ratio": 0.123, "gets": LARGE,
            "miss_causes": causes, "lookups": LARGE + 16, "lookups_absent": LARGE + 17,
        },
        "memory": {"resident_bytes": 1 << 34},
        "s3": {
            "listen": ["127.0.0.1:9036", "[::1]:9036"], "tls": True, "objects": LARGE + 29,
            "requests": {"GetObject": LARGE, "PutObject": 1}, "bytes_read": 1 << 40, "bytes_written": 1 << 30,
            "refusals": {"NoSuchKey": LARGE + 30, "AccessDenied": 2}, "rdma": "10.1.0.5",
            "rdma_connections": LARGE + 31, "rdma_bytes_read": 1 << 39, "rdma_bytes_written": 1 << 29,
        },
        "query": {
            "listen": ["127.0.0.1:9037"], "tls": False, "requests": LARGE + 37, "prompts": LARGE + 38,
            "keys": LARGE + 39, "keys_in_memory": LARGE + 40, "keys_on_flash": LARGE + 41,
            "keys_in_g4": LARGE + 60,
            "refusals": {"401": 3},
        },
        "spill": [
            {
                "place": f"folder /{NAME}", "error": "the room that is configured is used up",
                "left_alone": True, "asked": LARGE + 42, "late": LARGE + 43, "lost": LARGE + 44,
                "failed": LARGE + 45, "not_asked": LARGE + 46,
                "volumes": {
                    NAME: {
                        "bundles": LARGE + 47, "bundles_dropped": LARGE + 48, "bundles_deleted": LARGE + 49,
                        "returned": LARGE + 50, "bytes_used": 1 << 41, "bytes_max": 1 << 42,
                    }
                },
            }
        ],
        "not_served": {"/fs": f"{NAME} names blocks of another pool", "S3 of tenant blue": NAME},
        "volumes": [
            {
                "name": NAME, "kind": "files", "suite": "aes-256-xts+crc64", "slots": LARGE + 10,
                "slots_seen_taken": LARGE + 11, "gets": LARGE + 12, "hit_ratio": None, "puts": LARGE + 13,
                "evictions": LARGE + 14, "prestaged_bytes": 1 << 58, "prestage_hits": LARGE + 26,
                "prestage_useful_bytes": 1 << 57, "prestage_wasted_bytes": 1 << 56,
                "prestage_late": LARGE + 27,
                "prefix_requests": LARGE + 31, "prefix_asked": LARGE + 32, "prefix_usable": LARGE + 33,
                "prefix_loaded": LARGE + 34, "prefix_stored": LARGE + 35, "prefix_saved_ms": 90_000_500,
                "prefix_cost_ms": 500, "prefix_holes": {"evicted": LARGE + 36, "unknown": 0},
            }
        ],
        "tenants": [
            {
                "name": NAME, "room_is_counted": False,
                "slots_known_taken": LARGE + 18, "slots_max": LARGE + 19,
                "bytes_known_taken": LARGE + 20, "bytes_max": LARGE + 21, "bandwidth_max": LARGE + 22,
                "quota_puts_refused": LARGE + 23, "bandwidth_late": LARGE + 24,
                "bandwidth_waits": LARGE + 25,
            }
        ],
        "enclosures": [
            {
                "name": NAME, "connected": False, "fault": "Connection refused by the peer " * 6,
                "namespaces": 256, "namespaces_paused": 255, "namespaces_suspect": 254,
                "reconnects": LARGE + 15, "access": ["inaccessible"], "sent_elsewhere": LARGE,
            }
        ],
    }  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_nothing_is_cut_off(width: int) -> None:
    shown = io.StringIO()
    found = snapshot()
    Console(file=shown, width=width).print(tables(found, None))
    text = shown.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    sizes = range(LARGE + 20, LARGE + 23)
    for number in (
        *range(LARGE + 10, LARGE + 16),
        *range(LARGE + 18, LARGE + 28),
        *range(LARGE + 31, LARGE + 37),
        *range(LARGE + 47, LARGE + 51),
    ):
        if number in sizes:
            continue
        assert str(number) in text, "a number stands in one piece"
    for count in found["totals"]["miss_causes"].values():
        assert str(count) in text
    assert f"looked up by exists: {LARGE + 16} keys, {LARGE + 17} absent" in " ".join(text.split())
    assert text.count("n" * 10) >= 6
    assert found["pool"]["id"] in text
    whole = " ".join(text.split())
    for said in (
        "919.8 GiB of", "919.8 GiB/s", "up for 115 d 17 h",
        "30 namespaces", "by itself: " + "f" * 32, "wait for: the pool to be settled",
        "contested: " + "e" * 32, "not settled",
        f"values moved: {LARGE + 28}; left to move: not known",
        f"not served: /fs: {NAME[:10]}", "blocks of another pool", "not served: S3 of tenant blue: ",
        f"S3 at https://127.0.0.1:9036, https://[::1]:9036: {LARGE + 29} objects, {LARGE + 1} requests",
        f"refused: AccessDenied 2, NoSuchKey {LARGE + 30}", "90000.0 s",
        f"queries at http://127.0.0.1:9037/query: {LARGE + 37} requests, {LARGE + 38} prompts",
        f"{LARGE + 40} in memory, {LARGE + 41} on flash, {LARGE + 60} in G4; refused: 401 3",
        f": {LARGE + 42} ranges asked for, {LARGE + 43} late, {LARGE + 44} lost, {LARGE + 45} failed, "
        f"{LARGE + 46} not asked; left alone for now; the room that is configured is used up",
    ):  # fmt: skip
        assert said in whole


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_a_name_of_the_length_that_names_have_stands_in_one_piece(width: int) -> None:
    found = snapshot()
    names = ["files-large", "tenant-of-the-blue-team", "jbof-rack-12.example.net"]
    for kind, name in zip(("volumes", "tenants", "enclosures"), names, strict=True):
        found[kind][0]["name"] = name
    shown = io.StringIO()
    Console(file=shown, width=width).print(tables(found, None))
    assert [shown.getvalue().count(name) for name in names] == [4, 2, 1]
    assert "aes-256-xts+crc64" in shown.getvalue()


def test_of_members_nothing_is_said_where_there_is_nothing_to_be_said() -> None:
    """A tenant's door does not say it, and a settled pool without newcomers has nothing to say."""
    shown = io.StringIO()
    found = snapshot()
    found["pool"], found["s3"] = {"id": "0", "namespaces": 1, "namespaces_away": 0}, None
    found["query"] = None
    found["not_served"], found["spill"] = {}, []
    Console(file=shown, width=80).print(tables(found, None))
    assert "not served" not in shown.getvalue()
    assert "S3" not in shown.getvalue()
    assert "G4" not in shown.getvalue()
    assert "not in the pool" not in shown.getvalue()
    assert "settle" not in shown.getvalue()


def test_an_rdma_device_that_failed_is_named() -> None:
    for lost, is_said in (("polling: errno 5", True), ("", False)):
        shown = io.StringIO()
        found = snapshot()
        found["s3"]["rdma_lost"] = lost
        Console(file=shown, width=200).print(tables(found, None))
        text = " ".join(shown.getvalue().split())
        assert (f"its device failed ({lost}): plain HTTP until" in text) is is_said


def test_what_is_wrong_stands_before_what_is_counted() -> None:
    shown = io.StringIO()
    Console(file=shown, width=100).print(tables(snapshot(), None))
    text = shown.getvalue()
    places = [text.index(word) for word in ("not served: /fs", "Enclosures", "contested", "hits:", "Volumes")]
    assert places == sorted(places)


@pytest.mark.parametrize("height", [24, 30])
def test_a_live_page_has_the_lines_of_its_screen(height: int) -> None:
    """The last line says that there is more: what falls off is never what is away."""
    shown = io.StringIO()
    console = Console(file=shown, width=80, height=height, legacy_windows=False)
    page = fitted(health_that_fits(snapshot(), console), tables(snapshot(), None), console, Scroll())
    console.print(page, end="")
    lines = shown.getvalue().splitlines()
    assert len(lines) == height
    assert lines[0].startswith("4079 of 4096 namespaces reached")
    assert "below: g35 status shows all" in lines[-1]


def test_a_live_page_in_a_pipe_is_each_look_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_verb, "read_status", lambda _mount: snapshot())
    status_verb.top(None, Path("/mnt"), 0.0, 2)
    assert capsys.readouterr().out.count("\nmount   /mnt/m") == 2


def test_a_mount_that_a_killed_up_has_left_is_the_one_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, check=True)
    Layout(tmp_path).write_running(Running(int(ended.stdout), "/mnt/a pool", 2))
    mounted = {Path("/mnt/a pool")}

    def asked(*_args: object) -> str:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(layout, "is_mounted", lambda mount: mount in mounted)
    monkeypatch.setattr(status_document, "asked", asked)
    for verb in (status_verb.status, status_verb.top):
        with pytest.raises(G35Error, match="/mnt/a pool is dead: its agent has ended") as dead:
            verb(tmp_path, None)
        assert "'/mnt/a pool'" in dead.value.advice
    mounted.clear()
    with pytest.raises(G35Error, match="no pool is up"):
        status_verb.status(tmp_path, None)
