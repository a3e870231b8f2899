"""What connectors report of their requests, at the agent's control face."""

from __future__ import annotations

import errno

import pytest

from agent.fs.interface import Caller, FsError
from agent.host_os.per_user_bounds import Bounds
from agent.pool.counters import MissCause
from host_shim.control_wire import FLAG_NO_ANSWER, Operation, Outcome, PrefixReport, Request
from tests.unit.agent.bounds.test_walked_to_their_bounds import Control

REPORTS = [
    PrefixReport(4, 3, 2, 5, 2, Outcome.EVICTED, 1700, 300),
    PrefixReport(9, 9, 9, 0, 9, Outcome.HIT, -200, 500),
    PrefixReport(1, 0, 0, 1, 0, Outcome.UNKNOWN, None, 0),
]


def told(control: Control, whole: bytes) -> None:
    keys = tuple(whole[at : at + 16] for at in range(0, len(whole), 16))
    session = control.session(Caller(0))
    control.ask(session, Request(Operation.REPORT, 1, "v", keys, flags=FLAG_NO_ANSWER))


def test_reports_are_summed_for_their_volume() -> None:
    control = Control(Bounds())
    told(control, b"".join(each.encode() for each in REPORTS))
    tally = control.agent.tally
    assert (tally.prefix_requests, tally.prefix_asked, tally.prefix_found, tally.prefix_usable) == (
        3,
        14,
        12,
        11,
    )
    assert (tally.prefix_stored, tally.prefix_loaded, tally.prefix_load_ms) == (6, 11, 800)
    assert (tally.prefix_saved_ms, tally.prefix_cost_ms) == (1700, 200)
    assert {cause: count for cause, count in tally.prefix_holes.items() if count} == {MissCause.EVICTED: 1}
    assert tally.prefix_holes_unknown == 1


@pytest.mark.parametrize("bad", [b"\xff" * 32, REPORTS[0].encode() + b"\xff" * 32, REPORTS[0].encode()[:16]])
def test_reports_are_counted_and_nonsense_is_refused_whole(bad: bytes) -> None:
    control = Control(Bounds())
    with pytest.raises(FsError) as refused:
        told(control, bad)
    assert refused.value.errno == errno.EINVAL
    assert control.agent.tally.prefix_requests == 0
