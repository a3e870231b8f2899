"""What connectors say of their requests (`PrefixReport`), added to the counters of a volume."""

import errno
from collections.abc import Sequence

from agent.fs.interface import FsError
from agent.pool.counters import MissCause, Tally
from host_shim.control_wire import MalformedControl, Outcome, decode_report_untrusted


def count_reports(tally: Tally, keys: Sequence[bytes]) -> None:
    """Add what connectors say of their requests. Raises FsError; then nothing was added."""
    try:
        if len(keys) % 2:
            raise MalformedControl("a report takes the place of two keys")
        reports = [decode_report_untrusted(keys[at] + keys[at + 1]) for at in range(0, len(keys), 2)]
    except MalformedControl as malformed:
        raise FsError(errno.EINVAL, str(malformed)) from None
    for report in reports:
        tally.prefix_requests += 1
        tally.prefix_asked += report.asked
        tally.prefix_found += report.found
        tally.prefix_usable += report.usable
        tally.prefix_stored += report.stored
        tally.prefix_loaded += report.loaded
        tally.prefix_load_ms += report.load_ms
        saved = report.saved_ms or 0
        tally.prefix_saved_ms += max(0, saved)
        tally.prefix_cost_ms += max(0, -saved)
        if report.cause is Outcome.UNKNOWN:
            tally.prefix_holes_unknown += 1
        elif report.cause is not Outcome.HIT:
            tally.prefix_holes[MissCause(report.cause.value)] += 1
