"""Media errors of a volume: strikes against slots, and slots that somebody should look at.

A get that met damage and a put whose write the medium refused leave a report; agent/pool/maintenance/scrub.py
looks at the slot again. All of it is in memory and bounded: the next read of a forgotten slot, or a scrub,
finds it again.
"""

import logging
import threading
from collections import OrderedDict
from typing import NamedTuple

from agent.host_os.rate_limited_log import Complaints
from agent.pool.volume.directory_cache import CachedSet

log = logging.getLogger(__name__)

SUSPECTS_MAX = 4096
REPORTS_MAX = 256
STRIKES = 2
"""So often is damage met in a slot, each time after a write that was answered well, before the medium is
blamed. An agent may have died amid a write, and most drives replace a bad sector when it is written."""


class SlotAt(NamedTuple):
    """A slot of a volume: namespace (index into the pool map), byte offset of its set there, number in it."""

    namespace: int
    offset: int
    slot: int


class MediaErrors:
    """Strikes and reports of one volume. Safe from any thread; the oldest are dropped first."""

    def __init__(self) -> None:
        self._strikes: OrderedDict[SlotAt, int] = OrderedDict()
        self._reports: OrderedDict[SlotAt, float | None] = OrderedDict()
        self._lock = threading.Lock()
        self.complaints = Complaints(log)
        """Of what looks at slots: a drive that fails repeats them at any rate."""

    def __len__(self) -> int:
        return len(self._strikes) + len(self._reports)

    def strike(self, place: SlotAt) -> int:
        """Count damage that was met in a slot; how often now."""
        with self._lock:
            count = self._strikes.pop(place, 0) + 1
            self._strikes[place] = count
            if len(self._strikes) > SUSPECTS_MAX:
                self._strikes.popitem(last=False)
            return count

    def refused_a_write(self, of: CachedSet, slot: int) -> None:
        """The medium of a slot did not take what was written."""
        place = SlotAt(of.namespace, of.offset, slot)
        self.strike(place)
        self.report(place)

    def strikes(self, place: SlotAt) -> int:
        return self._strikes.get(place, 0)

    def forgive(self, place: SlotAt) -> None:
        """The slot was set aside, or given back by the operator: counting begins anew."""
        with self._lock:
            self._strikes.pop(place, None)

    def report(self, place: SlotAt) -> None:
        with self._lock:
            self._reports.setdefault(place)
            if len(self._reports) > REPORTS_MAX:
                self._reports.popitem(last=False)

    def next_report(self, now: float, age: float) -> SlotAt | None:
        """The oldest report, the caller's now, `age` seconds after it was first asked for: a drive's short
        trouble is over then."""
        if not self._reports:
            return None
        with self._lock:
            for place, since in list(self._reports.items()):
                if since is None:
                    self._reports[place] = now
            place, since = next(iter(self._reports.items()))
            if since is None or now - since < age:
                return None
            del self._reports[place]
            return place
