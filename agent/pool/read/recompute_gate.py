"""Saying `late` at once where fetching a value would take longer than computing it again.

An engine that waits for a block which it could have computed in the meantime is worse off than without the
pool. The operator says how fast an engine computes (tokens a second of prefill) and what a token weighs
(bytes). What flash takes is measured here: bytes that gets brought in the time in which gets were under way,
and the bytes that those under way have still to bring. A get whose turn would come too late is a miss before
anything was sent. Now and then one is let through all the same, for nothing else would tell that flash is
quick again.

What waits in memory is always served. What no remembered directory names is neither judged nor measured: its
length is not known.
"""

import threading
from typing import Final

from agent.pool.counters import MissCause
from agent.pool.format.sealed_slot import OpenSlot
from agent.pool.read.get import SlotReader, remembered_length
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.read.reader_base import Request
from agent.pool.steps import Steps
from agent.pool.volume.volume import Volume

BUSY_SECONDS: Final = 0.5
"""Over so much time with gets under way the bandwidth is measured; what is older counts half, and so on."""
TRUSTED_BYTES: Final = 1 << 20
"""Before so much was fetched there is no measurement, and nothing is refused."""
AGE_SECONDS: Final = 1.0
"""After so long, busy or not, what was measured counts half: after an outage the few gets that are let
through are to be believed within seconds."""
BUSY_LEAST_SECONDS: Final = 1e-9
"""Time that has faded to less says nothing."""
PROBE_SECONDS: Final = 0.5
"""So long after the last get that was let through, one is let through whatever the measurement says."""


class RecomputeGate:
    """The judgement for one volume. No I/O; `now` is in seconds of the channel's clock. Thread-safe."""

    def __init__(self, prefill_tokens_per_s: float, bytes_per_token: int) -> None:
        if prefill_tokens_per_s <= 0 or bytes_per_token <= 0:
            raise ValueError("a gate needs to know how fast tokens are computed, and what they weigh")
        self._recomputed_per_s = prefill_tokens_per_s * bytes_per_token
        self._under_way = 0
        self._since = 0.0
        self._busy = 0.0
        self._fetched = 0.0
        self._fetched_ever = 0
        self._let_through = float("-inf")
        self._lock = threading.Lock()

    def like(self) -> "RecomputeGate":
        """One that has measured nothing yet, for another place that values come from."""
        gate = RecomputeGate(1.0, 1)
        gate._recomputed_per_s = self._recomputed_per_s
        return gate

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second that gets bring together; None while too little was fetched to say."""
        if self._fetched_ever < TRUSTED_BYTES or self._busy < BUSY_LEAST_SECONDS:
            return None
        return self._fetched / self._busy

    def figures(self) -> dict[str, float | None]:
        """Bytes a second: what gets bring together, and what an engine computes."""
        return {"bytes_per_s": self.bandwidth, "recomputed_bytes_per_s": self._recomputed_per_s}

    def seconds_to_load(self, size: int) -> float | None:
        """How long `size` more bytes would take to come, behind those under way; None: not measured."""
        bandwidth = self.bandwidth
        return None if not bandwidth else (self._under_way + size) / bandwidth

    def seconds_to_compute(self, size: int) -> float:
        """How long an engine would take to compute `size` bytes again."""
        return size / self._recomputed_per_s

    def begin(self, size: int, now: float, asked: int | None = None) -> bool:
        """A get of `size` bytes: False where computing them is quicker.

        After True it is under way, with as many bytes as are `asked` for at first (None: all): call `end`.
        """
        with self._lock:
            self._pass_time(now)
            bandwidth = self.bandwidth
            # Multiplied out: after an outage nothing at all may have come.
            waits = bandwidth is not None and (
                (self._under_way + size) * self._recomputed_per_s > size * bandwidth
            )
            if waits and now - self._let_through < PROBE_SECONDS:
                return False
            self._let_through = now
            self._under_way += size if asked is None else asked
            return True

    def goes_on(self, size: int, now: float) -> None:
        """A get that was let through reads on, `size` bytes. Call `end` after it."""
        with self._lock:
            self._pass_time(now)
            self._under_way += size

    def end(self, size: int, came: int, now: float) -> None:
        """End a get: its bytes are under way no longer. `came`: the bytes that it brought."""
        with self._lock:
            self._pass_time(now)
            self._under_way -= size
            self._fetched += came
            self._fetched_ever += came
            while self._busy > BUSY_SECONDS:
                self._busy /= 2
                self._fetched /= 2

    def _pass_time(self, now: float) -> None:
        passed = max(0.0, now - self._since)
        kept = 0.5 ** (passed / AGE_SECONDS)
        self._busy *= kept
        self._fetched *= kept
        if self._under_way:
            self._busy += passed
        self._since = now


class GatedReader(SlotReader):
    """A get that is refused where it would come too late."""

    __slots__ = ("_gate",)

    def __init__(
        self, volume: Volume, key: bytes, prestage: PrestageCache | None, gate: RecomputeGate
    ) -> None:
        super().__init__(volume, key, prestage)
        self._gate = gate

    def _begin(self, request: Request) -> Steps[int]:
        gate, channel, length = self._gate, request.channel, self._length_from_flash()
        if self.cause is not None or length is None:
            return (yield from super()._begin(request))
        asked = max(0, min(len(request.into), length - request.offset))
        if not gate.begin(length, channel.now(), asked):
            request.tally.gets_gated += 1
            return self._lost(channel, MissCause.LATE)
        served = 0
        try:
            served = yield from super()._begin(request)
            return served
        finally:
            gate.end(asked, served, channel.now())

    def _next(self, request: Request, opened: OpenSlot) -> Steps[int | MissCause]:
        if self._is_in_memory():
            return (yield from super()._next(request, opened))
        gate, channel = self._gate, request.channel
        asked = max(0, min(len(request.into), opened.length - request.offset))
        gate.goes_on(asked, channel.now())
        came = 0
        try:
            served = yield from super()._next(request, opened)
            if isinstance(served, MissCause):
                return served
            came = served
            return served
        finally:
            gate.end(asked, came, channel.now())

    def _is_in_memory(self) -> bool:
        prestage = self._prestage
        return prestage is not None and prestage.holds(self.volume.settings.volume_id, self.pseudonym)

    def _length_from_flash(self) -> int | None:
        """The bytes that a directory names; None where it names none, or where they wait in memory."""
        volume = self._volume
        if self._is_in_memory():
            return None
        with volume.borrowed(self.pseudonym) as sets:
            return remembered_length(volume, self.pseudonym, sets)
