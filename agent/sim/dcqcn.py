"""Flows through one congested link, as a fluid whose rates DCQCN controls (Zhu et al., SIGCOMM 2015).

Each flow has a rate, and the link has one queue. Time goes on in steps of `step_s`:

    a flow sends          the least of its DCQCN rate, its port's rate, and what its window allows
    the queue             grows by what all send, and shrinks by the link's rate
    a flow is marked      with the chance that one of its packets in this step is (RED by the queue's length)
    its sender hears      a queue and a `base_s` later, once in `cnp_interval_s`: the rate is cut
    its rate rises        in rounds of time and of bytes, as DCQCN says

Without `ecn` nobody is marked, and windows alone bound the queue. A test compares times and shares with the
emulated NIC, packet by packet (tests/sim/test_fabric_model.py). Seconds, bytes, bytes a second.
"""

import random
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

FLOWS_MEASURED: Final = 8
"""Flows of one link for which its utilisation is known; more count as so many."""
MEASURED_S: Final = 0.02
WARM_UP_S: Final = 0.02
RECOVERED: Final = 0.999


@dataclass(frozen=True, slots=True)
class FluidSettings:
    """A link, its marks and its flows' control.

    Marks are a matter of how long the queue takes, as in the HPCC paper (Li et al., SIGCOMM 2019): 100 KB and
    400 KB at 25 Gb/s. Rates rise by parts of the link's rate, as in Zhu et al. at 40 Gb/s.
    """

    rate: float
    ecn: bool = True
    mark_from_s: float = 32e-6
    mark_all_s: float = 128e-6
    mark_part: float = 0.2
    base_s: float = 40e-6
    """From a packet's sending to its answer, with an empty queue."""
    window_bytes: int = 320 << 10
    """Bytes that a flow has under way at most."""
    packet_bytes: int = 4112
    cnp_interval_s: float = 50e-6
    gain: float = 1 / 256
    timer_s: float = 55e-6
    """Of alpha, and of the rounds of time."""
    round_bytes: int = 10_000_000
    fast_rounds: int = 5
    additive_part: float = 0.001
    hyper_part: float = 0.01
    least_part: float = 0.001
    step_s: float = 5e-6


class FluidFlow:
    """One flow: what it has still to send, and its sender's DCQCN."""

    __slots__ = (
        "_settings", "alpha", "alpha_at", "begin", "byte_rounds", "end", "heard_after", "left", "limited",
        "rate", "round_left", "target", "timer_at", "timer_rounds",
    )  # fmt: skip

    def __init__(self, settings: FluidSettings, size: float, begin: float) -> None:
        self._settings = settings
        self.left = size
        self.begin = begin
        self.end: float | None = None
        self.rate = self.target = settings.rate
        self.alpha = 1.0
        self.alpha_at = self.timer_at = self.heard_after = 0.0
        self.limited = False
        self.timer_rounds = self.byte_rounds = 0
        self.round_left = float(settings.round_bytes)

    def cut(self, now: float) -> None:
        """A notification has come."""
        settings = self._settings
        if self.alpha_at:
            self.alpha *= (1 - settings.gain) ** int((now - self.alpha_at) / settings.timer_s)
        self.target, self.rate = self.rate, self.rate * (1 - self.alpha / 2)
        self.rate = max(self.rate, settings.least_part * settings.rate)
        self.alpha += settings.gain * (1 - self.alpha)
        self.alpha_at, self.timer_at = now, now + settings.timer_s
        self.timer_rounds = self.byte_rounds = 0
        self.round_left = float(settings.round_bytes)
        self.limited = True

    def rise(self, now: float, sent: float) -> None:
        """Rounds that end in this step."""
        self.round_left -= sent
        while self.limited and (self.timer_at <= now or self.round_left <= 0):
            if self.timer_at <= now:
                self.timer_at += self._settings.timer_s
                self.timer_rounds += 1
            else:
                self.round_left += self._settings.round_bytes
                self.byte_rounds += 1
            self._round()

    def _round(self) -> None:
        settings = self._settings
        rounds = sorted((self.timer_rounds, self.byte_rounds))
        if rounds[0] > settings.fast_rounds:
            self.target += settings.hyper_part * settings.rate
        elif rounds[1] >= settings.fast_rounds:
            self.target += settings.additive_part * settings.rate
        self.target = min(self.target, settings.rate)
        self.rate = (self.rate + self.target) / 2
        if self.rate >= RECOVERED * settings.rate:
            self.rate = self.target = settings.rate
            self.limited = False


class FluidLink:
    """The link, its queue and its flows. `carried` and `queued`: byte counts and byte seconds, for means."""

    def __init__(self, settings: FluidSettings, seed: object = 35) -> None:
        self.settings = settings
        self.now = 0.0
        self.queue = 0.0
        self.carried = 0.0
        self.queued = 0.0
        self.flows: list[FluidFlow] = []
        self._dice = random.Random(f"fluid link {seed}")
        self._on_their_way: deque[tuple[float, FluidFlow]] = deque()
        """Marks, by the time at which the sender may hear of them."""

    def begin(self, size: float, at: float = 0.0) -> FluidFlow:
        """A flow of so many bytes (infinity: for good) that begins at a time."""
        flow = FluidFlow(self.settings, size, at)
        self.flows.append(flow)
        return flow

    def run(self, until: float) -> None:
        """Until a time, or until all flows have ended."""
        while self.now < until and any(flow.end is None for flow in self.flows):
            self.step()

    def step(self) -> None:
        settings, step = self.settings, self.settings.step_s
        self.now += step
        now, arrived = self.now, 0.0
        delay = settings.base_s + self.queue / settings.rate
        while self._on_their_way and self._on_their_way[0][0] <= now:
            flow = self._on_their_way.popleft()[1]
            if now >= flow.heard_after:
                flow.heard_after = now + settings.cnp_interval_s
                flow.cut(now)
        part = self._part_marked()
        for flow in self.flows:
            if flow.end is not None or flow.begin >= now:
                continue
            sent = min(min(flow.rate, settings.window_bytes / delay) * step, flow.left)
            flow.left -= sent
            arrived += sent
            if part and self._dice.random() > (1 - part) ** (sent / settings.packet_bytes):
                self._on_their_way.append((now + delay, flow))
            flow.rise(now, sent)
            if flow.left <= 0:
                # Its last byte is answered when the queue has passed it on.
                flow.end = now + delay
        left = min(settings.rate * step, self.queue + arrived)
        self.queue += arrived - left
        self.carried += left
        self.queued += self.queue * step

    def _part_marked(self) -> float:
        settings = self.settings
        waits = self.queue / settings.rate
        if not settings.ecn or waits <= settings.mark_from_s:
            return 0.0
        if waits >= settings.mark_all_s:
            return 1.0
        span = settings.mark_all_s - settings.mark_from_s
        return settings.mark_part * (waits - settings.mark_from_s) / span


@lru_cache(maxsize=16)
def steady_state(settings: FluidSettings) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What part of a link so many flows use that never end, from one to `FLOWS_MEASURED` of them, and how
    long the queue takes in which each of their packets waits, in seconds."""
    parts, waits = [], []
    for count in range(1, FLOWS_MEASURED + 1):
        link = FluidLink(settings, count)
        for _ in range(count):
            link.begin(float("inf"))
        link.run(WARM_UP_S)
        carried, queued = link.carried, link.queued
        link.run(WARM_UP_S + MEASURED_S)
        parts.append(min(1.0, (link.carried - carried) / (settings.rate * MEASURED_S)))
        waits.append((link.queued - queued) / (settings.rate * MEASURED_S))
    return tuple(parts), tuple(waits)
