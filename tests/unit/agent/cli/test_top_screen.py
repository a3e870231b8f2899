"""`g35 top` on a low screen: the health stays, the rest scrolls, and nothing is left out without a word."""

from __future__ import annotations

import io
import os
import pty
import termios
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from agent.cli.status_verb import _health, _room, _traffic, health_that_fits
from agent.cli.top_screen import Scroll, fitted, follow_keys, typed_keys
from tests.unit.agent.cli.test_status_tables import snapshot


def screen(height: int) -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    return Console(file=shown, width=80, height=height, legacy_windows=False), shown


def few_lines(count: int, word: str) -> Group:
    return Group(*(Text(f"{word} {number}") for number in range(count)))


def page(scroll: Scroll, height: int = 10, rest: int = 20) -> list[str]:
    console, shown = screen(height)
    parts = few_lines(3, "health"), few_lines(rest, "row")
    console.print(fitted(*parts, console, scroll, has_keys=True), end="")
    return shown.getvalue().splitlines()


def test_the_health_stays_and_the_rest_scrolls() -> None:
    scroll = Scroll()
    lines = page(scroll)
    assert len(lines) == 10
    assert lines[:4] == ["health 0", "health 1", "health 2", "row 0"]
    assert lines[-1].startswith("… 0 lines above, 14 below: arrows")
    for keys, first in (
        (b"j", 1), (b"\x1b[B\x1b[B", 3), (b"k", 2), (b" ", 8), (b"b", 2), (b"G", 14), (b"\x1b[6~", 14),
        (b"\x1b[5~", 8), (b"g", 0), (b"k", 0), (b"x\x1b[Z", 0),
    ):  # fmt: skip
        assert not scroll.typed(keys)
        lines = page(scroll)
        assert lines[:3] == ["health 0", "health 1", "health 2"]
        assert lines[3:9] == [f"row {number}" for number in range(first, first + 6)]
        assert lines[9].startswith(f"… {first} lines above, {14 - first} below")
    assert scroll.typed(b"jq")


def test_what_fits_is_shown_whole() -> None:
    scroll = Scroll(first=5)
    assert page(scroll, height=23)[-1] == "row 19"
    assert scroll.first == 0


def test_a_screen_lower_than_the_health_says_so() -> None:
    assert page(Scroll(), height=3) == [
        "health 0",
        "health 1",
        "… 0 lines above, 20 below: g35 status shows all",
    ]


def with_enclosures(count: int, bad: int) -> dict[str, Any]:
    found = snapshot()
    found["pool"] = {"id": "0", "namespaces": 256, "namespaces_away": 0}
    found["not_served"] = {}
    one = {
        "connected": True, "fault": "", "namespaces": 4, "namespaces_paused": 0, "namespaces_suspect": 0,
        "reconnects": 0, "access": [], "sent_elsewhere": 0,
    }  # fmt: skip
    found["enclosures"] = [{**one, "name": f"jbof-{number}"} for number in range(count)]
    found["enclosures"][bad] |= {"connected": False, "fault": "Connection refused"}
    return found


def test_of_many_enclosures_those_that_are_away_are_shown() -> None:
    console, shown = screen(24)
    found = with_enclosures(40, 37)
    health = health_that_fits(found, console)
    console.print(
        fitted(health, Group(*_traffic(found, None), *_room(found)), console, Scroll(), has_keys=True)
    )
    lines = shown.getvalue().splitlines()
    assert len(lines) == 24
    (row,) = (line for line in lines if "jbof-37" in line)
    assert "away: Connection" in row
    (more,) = (line for line in lines if "more, 0 of them away, paused or suspect" in line)
    hidden = 40 - sum("jbof-" in line for line in lines)
    assert more.startswith(f"{hidden} enclosures more")
    assert sum("hits:" in line for line in lines) == 1, "some of the rest is there, too"


def test_few_enclosures_keep_their_order() -> None:
    console, _ = screen(24)
    found = with_enclosures(3, 2)
    whole = Group(*_health(found))
    few = health_that_fits(found, console)
    assert console.render_lines(few) == console.render_lines(whole)


def test_keys_are_read_as_they_are_typed() -> None:
    ours, theirs = pty.openpty()
    try:
        with typed_keys(theirs) as keys:
            assert keys is not None
            assert keys(0.0) == b""
            os.write(ours, b"Gk")
            assert keys(1.0) == b"Gk"
            assert not termios.tcgetattr(theirs)[3] & (termios.ECHO | termios.ICANON)
        assert termios.tcgetattr(theirs)[3] & termios.ECHO
    finally:
        os.close(ours)
        os.close(theirs)


def test_the_page_follows_each_key_until_the_time_is_over() -> None:
    scroll, drawn = Scroll(room=5), []
    typed = iter([b"j", b"", b" ", b"q"])
    assert follow_keys(lambda _left: next(typed), scroll, lambda: drawn.append(scroll.first), 60.0)
    assert drawn == [1, 6]
    assert not follow_keys(lambda _left: b"q", scroll, drawn.clear, 0.0)


def test_without_a_terminal_there_are_no_keys() -> None:
    with open(os.devnull, "rb") as nowhere, typed_keys(nowhere.fileno()) as keys:
        assert keys is None
