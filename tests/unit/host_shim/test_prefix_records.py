"""A record for each request: what its prefix was worth, and why it was not used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import pytest

from host_shim import prefix_records
from host_shim.control_wire import (
    REPORT_BYTES,
    MalformedControl,
    Outcome,
    PrefixReport,
    decode_report_untrusted,
)
from host_shim.prefix_records import PrefixRecords, Speeds
from tests.support.waiting import wait_until

HIT, EVICTED = Outcome.HIT, Outcome.EVICTED


class Kept:
    """Records whose reports a test reads."""

    def __init__(self, speeds: Speeds = Speeds()) -> None:  # noqa: B008
        self.reports: list[PrefixReport] = []
        self.asked = 0
        self.now = 100.0
        self._speeds = speeds
        self.records = PrefixRecords(self._ask, self._send, lambda: self.now)

    def _ask(self) -> Speeds:
        self.asked += 1
        return self._speeds

    def _send(self, reports: Sequence[PrefixReport]) -> None:
        self.reports += reports

    def wait(self, count: int) -> list[PrefixReport]:
        wait_until(lambda: len(self.reports) >= count, 10, f"{count} reports")
        return self.reports


@pytest.fixture
def keep() -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []

    def new(*given: Speeds) -> Kept:
        made.append(Kept(*given))
        return made[-1]

    yield new
    for each in made:
        each.records.close()


def test_a_request_has_one_record_of_all_that_became_of_it(
    keep: Callable[..., Kept], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "host_shim.prefix_records")
    kept = keep(Speeds(load=1000.0, compute=100.0))
    kept.records.note_answers("r", [HIT, HIT, EVICTED, HIT])
    kept.records.note_moved("r", loaded=2, size=200, seconds=0.3)
    kept.records.note_moved("r", stored=5)
    assert kept.reports == []
    kept.records.finish("r")
    kept.records.finish("r")
    assert kept.wait(1) == [PrefixReport(4, 3, 2, 5, 2, EVICTED, 1700, 300)]
    last = kept.records.last
    assert last is not None
    assert (last.hole, last.load_estimate, last.compute_seconds) == (2, 0.2, 2.0)
    assert kept.records.totals() == {
        "requests": 1, "asked": 4, "found": 3, "usable": 2, "stored": 5, "loaded": 2, "load_ms": 300,
        "saved_ms": 1700, "holes": {"evicted": 1},
    }  # fmt: skip
    [line] = [record.message for record in caplog.records]
    assert line == (
        "prefix: 4 blocks asked for, 3 found, 2 usable, hole at 2: evicted; loaded 2 in 300.0 ms "
        "(estimated 200.0), saved 1700.0 ms; stored 5"
    )
    caplog.clear()


def test_loading_that_took_longer_than_computing_is_a_cost(keep: Callable[..., Kept]) -> None:
    kept = keep(Speeds(None, 1000.0))
    kept.records.note_answers("r", [HIT])
    kept.records.note_moved("r", loaded=1, size=100, seconds=0.4)
    kept.records.finish("r")
    assert kept.wait(1)[0].saved_ms == -300
    assert kept.records.totals()["cost_ms"] == 300


def test_without_a_gate_nobody_knows_what_was_saved(keep: Callable[..., Kept]) -> None:
    kept = keep()
    kept.records.note_answers("r", [None, HIT])
    kept.records.finish("r")
    assert kept.wait(1) == [PrefixReport(2, 1, 0, 0, 0, Outcome.UNKNOWN, None, 0)]
    assert kept.records.totals()["holes"] == {"no answer": 1}


def test_the_agent_is_asked_for_its_figures_now_and_then(keep: Callable[..., Kept]) -> None:
    kept = keep()
    for number in range(3):
        kept.records.note_answers(number, [HIT])
        kept.records.finish(number)
        kept.wait(number + 1)
    assert kept.asked == 1
    kept.now += prefix_records.SPEEDS_SECONDS
    kept.records.note_answers("late", [HIT])
    kept.records.finish("late")
    kept.wait(4)
    assert kept.asked == 2


def test_a_question_ends_when_all_that_it_can_bring_was_loaded(keep: Callable[..., Kept]) -> None:
    kept = keep()
    kept.records.note_question(["a", "b"], [HIT, HIT])
    kept.records.note_keys_moved(["a"], [True], is_load=True, size=10, seconds=0.1)
    assert kept.reports == []
    kept.records.note_keys_moved(["b"], [False], is_load=True, size=10, seconds=0.1)
    assert kept.wait(1) == [PrefixReport(2, 2, 2, 0, 1, HIT, None, 200)]


def test_a_question_with_a_hole_has_what_is_stored_behind_it_until_it_is_old(
    keep: Callable[..., Kept],
) -> None:
    kept = keep()
    kept.records.note_question(["a", "b", "c"], [HIT, EVICTED, Outcome.UNKNOWN])
    kept.records.note_keys_moved(["a"], [True], is_load=True, size=10, seconds=0.0)
    kept.records.note_keys_moved(["b", "c", "d"], [True, False, True], is_load=False, size=0, seconds=0.0)
    kept.now += prefix_records.QUESTION_SECONDS
    kept.records.note_question(["x"], [HIT])
    assert kept.wait(1) == [PrefixReport(3, 1, 1, 1, 1, EVICTED, None, 0)]
    assert kept.records.totals()["stored"] == 2, "of no question, and stored all the same"


def test_everything_is_bounded(keep: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_records, "OPEN_MAX", 10)
    monkeypatch.setattr(prefix_records, "KEYS_MAX", 20)
    kept = keep()
    for number in range(100):
        kept.records.note_answers(number, [HIT])
        kept.records.note_question([f"{number} {at}" for at in range(3)], [EVICTED] * 3)
    assert len(kept.records._open) == 10
    assert len(kept.records._question_of) == 20
    assert len(kept.wait(190)) == 190


def test_a_report_is_the_same_behind_the_wire_and_bad_bytes_are_refused() -> None:
    for report in (
        PrefixReport(4, 3, 2, 5, 1, EVICTED, -7, 9),
        PrefixReport(0, 0, 0, 0, 0, HIT, None, 0),
        PrefixReport(1, 0, 0, 0, 0, Outcome.UNKNOWN, 0, 1),
    ):
        assert decode_report_untrusted(report.encode()) == report
    most = PrefixReport(1 << 40, 1 << 40, 1 << 40, 1 << 40, 1 << 40, HIT, 1 << 40, 1 << 40).encode()
    assert decode_report_untrusted(most).asked == (1 << 32) - 1
    good = bytearray(PrefixReport(4, 3, 2, 5, 1, EVICTED, -7, 9).encode())
    for bad in (b"", bytes(REPORT_BYTES - 1), good[:4] + b"\xff" + good[5:], good[:20] + b"\x63" + good[21:]):
        with pytest.raises(MalformedControl):
            decode_report_untrusted(bytes(bad))
