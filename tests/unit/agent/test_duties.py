"""A duty that fails keeps no other from its turn, is said once and counted."""

from __future__ import annotations

import logging

import pytest

from agent.service.upkeep import Duties


@pytest.mark.expects_log("looking failed")
@pytest.mark.expects_log("looking goes well again, after 4 failures")
def test_a_duty_that_fails_keeps_no_other_from_its_turn_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[str] = []
    faults: list[type[Exception] | None] = [
        OverflowError,
        OverflowError,
        ValueError,
        OverflowError,
        None,
        None,
    ]

    def look() -> None:
        fault = faults.pop(0)
        done.append("looked")
        if fault is not None:
            raise fault("a bug")

    duties = Duties({"looking": look, "moving": lambda: done.append("moved")})
    for _ in range(6):
        duties.turn()
    assert done == ["looked", "moved"] * 6
    assert duties.failed == {"looking": 4, "moving": 0}
    said = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 3, "each time that it is another failure"
    assert all(record.exc_info is not None for record in said)


def test_what_ends_a_process_ends_it() -> None:
    def leave() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Duties({"leaving": leave}).turn()
