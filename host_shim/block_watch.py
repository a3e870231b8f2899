"""What a connector tells of its blocks: events for routers, and a record of each question.

For engines that give their storage no name of the request; vLLM's tier, which has one, does both by itself.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from host_shim.connector_jobs import JobRunner
from host_shim.control_wire import Outcome
from host_shim.kv_events import EventStream, KvEvents, Publisher
from host_shim.named_values import NamedValues
from host_shim.prefix_records import PrefixRecords

_log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
GONE = frozenset({Outcome.NEVER_STORED, Outcome.EVICTED, Outcome.EXPIRED, Outcome.CORRUPT, Outcome.WRONG_KEY})
"""A block that is late, or whose enclosure is away, may be there."""


class BlockWatch:
    """Of one connector. Any thread; only `loaded` may wait for the pool, where a block was not there."""

    def __init__(
        self,
        values: NamedValues,
        names: Callable[[Sequence[Any]], list[bytes]],
        hash_of: Callable[[Any], Hashable | None],
        new_publisher: Callable[[], Publisher] | None = None,
    ) -> None:
        """`names` makes names of an engine's keys, `hash_of` what events call one; None: nothing.

        Where there can be no publisher, the values are closed, and what it raised is raised.
        """
        self._values, self._names, self._hash_of = values, names, hash_of
        try:
            publisher = None if new_publisher is None else new_publisher()
        except BaseException:
            values.close()
            raise
        self.records = PrefixRecords(values.speeds, values.report)
        self.events = None if publisher is None else KvEvents()
        self._stream: EventStream | None = None
        if self.events is not None and publisher is not None:
            self._stream = EventStream(self.events, publisher)

    def looked_up(self, keys: Sequence[Any], outcomes: Sequence[Outcome | None]) -> None:
        """What the pool said of some keys, in their order."""
        self.records.note_question(keys, outcomes)
        self._tell_gone([key for key, one in zip(keys, outcomes, strict=True) if one in GONE])

    def stored(self, keys: Sequence[Any], done: Sequence[bool]) -> None:
        self.records.note_keys_moved(keys, done, is_load=False, size=0, seconds=0.0)
        if self.events is not None:
            self.events.stored(self._hashes([key for key, well in zip(keys, done, strict=True) if well]))

    def loaded(self, keys: Sequence[Any], done: Sequence[bool], size: int, seconds: float) -> None:
        """Which of the keys were loaded, each of `size` bytes, in so many seconds together."""
        self.records.note_keys_moved(keys, done, is_load=True, size=size, seconds=seconds)
        missed = [key for key, well in zip(keys, done, strict=True) if not well]
        if missed and self.events is not None:
            outcomes = self._values.lookup(self._names(missed))
            self._tell_gone([key for key, one in zip(missed, outcomes, strict=True) if one in GONE])

    def deleted(self, keys: Sequence[Any]) -> None:
        self._tell_gone(keys)

    def status(self) -> dict[str, Any]:
        """Sums over the questions, and how many events went out or were lost."""
        found: dict[str, Any] = {"prefixes": self.records.totals()}
        if self.events is not None:
            found["events"] = {"told": self.events.count, "lost": self.events.lost}
        return found

    def close(self, *runners: JobRunner) -> None:
        """End the connector: what its runners have begun, for CLOSE_SECONDS at most, the threads here, and
        the values. What waited has failed."""
        ended = [runner.close(CLOSE_SECONDS) for runner in runners]
        self.records.close()
        if self._stream is not None:
            self._stream.close()
        if not all(ended) or not self._values.close():
            _log.warning("the g35 mount %s still holds a call of the engine at its end", self._values.mount)

    def _tell_gone(self, keys: Sequence[Any]) -> None:
        if keys and self.events is not None:
            self.events.gone(self._hashes(keys))

    def _hashes(self, keys: Sequence[Any]) -> list[Hashable]:
        hashes = map(self._hash_of, keys)
        return [each for each in hashes if each is not None]
