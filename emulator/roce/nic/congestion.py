"""Congestion control of a device: DCQCN over marked packets and CNPs (IBTA annex A17.9; Zhu et al.,
"Congestion Control for Large-Scale RDMA Deployments", SIGCOMM 2015, section 3).

    switch               marks packets of a long queue (ECN, congestion experienced)
    notification point   the receiver: one CNP for each connection in `cnp_interval_s` at most
    reaction point       the sender: `RateLimiter`, one for each connection that a CNP named

Without settings a device neither marks, tells nor paces: the default. With settings the device sends no
faster than its port, `line_rate`. A connection begins at that rate, and a CNP cuts it:

    target = rate;  rate *= 1 - alpha / 2;  alpha = (1 - gain) * alpha + gain

Without a CNP alpha falls by the factor 1 - gain in each `alpha_timer_s`. The rate rises in rounds. A round
ends after `increase_timer_s`, and one of another kind after `round_bytes`:

    fewer than `fast_rounds` of both kinds        fast recovery:      rate = (rate + target) / 2
    more of both kinds                            hyper increase:     target += hyper, and so on
    else                                          additive increase:  target += additive, and so on

No I/O and no clock: each call is given `now`, in seconds. Sizes in bytes, rates in bytes a second.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from emulator.roce.nic.path import Path
from emulator.roce.nic.verbs import Burst
from emulator.roce.wire.cnp import Cnp

RECOVERED: Final = 0.999
"""Part of the line rate from which on a connection is not limited any more."""

ROUND_BYTES_LEAST: Final = 1024


@dataclass(frozen=True, slots=True)
class CongestionSettings:
    """Settings of a device. Defaults are those of the paper, with its rates as parts of the 40 Gb/s that it
    has them for. ValueError for settings with which a rate would never rise, or never fall."""

    line_rate: float
    """Of the device's port."""
    cnp_interval_s: float = 50e-6
    gain: float = 1 / 256
    alpha_timer_s: float = 55e-6
    increase_timer_s: float = 55e-6
    round_bytes: int = 10_000_000
    fast_rounds: int = 5
    additive_part: float = 0.001
    hyper_part: float = 0.01
    least_part: float = 0.001
    """Of the line rate: what a connection is never cut below."""
    burst_s: float = 10e-6
    """A connection sends so much of its rate at once, one packet at least."""

    def __post_init__(self) -> None:
        for name in ("line_rate", "cnp_interval_s", "alpha_timer_s", "increase_timer_s", "burst_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}, and has to be above zero")
        for name in ("additive_part", "hyper_part", "least_part"):
            value = getattr(self, name)
            # So few rounds lead from the least rate to the line rate that they can be made up for at once.
            if not 1e-4 <= value <= 1:
                raise ValueError(f"{name} is {value}, and has to be from 0.0001 to 1")
        if not 0 < self.gain < 1:
            raise ValueError(f"gain is {self.gain}, and has to be between 0 and 1")
        if self.round_bytes < ROUND_BYTES_LEAST or self.fast_rounds < 1:
            raise ValueError(f"round_bytes has to be {ROUND_BYTES_LEAST} or more, and fast_rounds 1 or more")


class RateLimiter:
    """The reaction point of one connection."""

    __slots__ = (
        "_alpha_at", "_byte_rounds", "_bytes", "_settings", "_timer_at", "_timer_rounds", "alpha", "limited",
        "next_at", "rate", "target",
    )  # fmt: skip

    def __init__(self, settings: CongestionSettings) -> None:
        self._settings = settings
        self.rate = self.target = settings.line_rate
        self.alpha = 1.0
        self.limited = False
        self.next_at = 0.0
        """When the next packets may go."""
        self._alpha_at = self._timer_at = 0.0
        self._bytes = self._timer_rounds = self._byte_rounds = 0

    def notified(self, now: float) -> None:
        """A CNP has come."""
        settings = self._settings
        self.pass_time(now)
        periods = int((now - self._alpha_at) / settings.alpha_timer_s) if self._alpha_at else 0
        self.alpha *= (1 - settings.gain) ** periods
        self.target = self.rate
        self.rate = max(self.rate * (1 - self.alpha / 2), settings.least_part * settings.line_rate)
        self.alpha = (1 - settings.gain) * self.alpha + settings.gain
        self.limited = True
        self._alpha_at = now
        self._timer_at = now + settings.increase_timer_s
        self._bytes = self._timer_rounds = self._byte_rounds = 0

    def pass_time(self, now: float) -> None:
        """End the rounds whose time is over."""
        while self.limited and self._timer_at <= now:
            self._timer_rounds += 1
            self._timer_at += self._settings.increase_timer_s
            self._increase()

    def sent(self, size: int, now: float) -> None:
        """So many bytes go out now."""
        if not self.limited:
            return
        self.next_at = max(self.next_at, now) + size / self.rate
        rounds, self._bytes = divmod(self._bytes + size, self._settings.round_bytes)
        for _ in range(rounds):
            self._byte_rounds += 1
            self._increase()

    def _increase(self) -> None:
        settings = self._settings
        fast, line = settings.fast_rounds, settings.line_rate
        if min(self._timer_rounds, self._byte_rounds) > fast:
            self.target += settings.hyper_part * line
        elif max(self._timer_rounds, self._byte_rounds) >= fast:
            self.target += settings.additive_part * line
        self.target = min(self.target, line)
        self.rate = (self.rate + self.target) / 2
        if self.rate >= RECOVERED * line:
            self.rate = self.target = line
            self.limited = False


class DeviceCongestion:
    """What a device with congestion control keeps: its port, who waits for its time, and CNPs to send.

    Bounds: each connection waits once, and has one CNP waiting.
    """

    def __init__(self, settings: CongestionSettings) -> None:
        self.settings = settings
        self.port_free_at = 0.0
        """When the port has sent what it was given."""
        self._waiting: dict[Callable[[], None], float] = {}
        self._notices: dict[Cnp, Path] = {}

    def burst_packets(self, limiter: RateLimiter | None, mtu: int) -> int:
        rate = self.settings.line_rate if limiter is None else limiter.rate
        return max(1, int(rate * self.settings.burst_s / mtu))

    def may_send(self, limiter: RateLimiter, wake: Callable[[], None], now: float) -> bool:
        """Whether it is time for packets of a connection; if not, `wake` is called when it is."""
        if not limiter.limited:
            return True
        limiter.pass_time(now)
        if limiter.next_at <= now or not limiter.limited:
            return True
        self._waiting[wake] = limiter.next_at
        return False

    def sent(self, size: int, now: float) -> None:
        """The port is given so many bytes."""
        self.port_free_at = max(self.port_free_at, now) + size / self.settings.line_rate

    def notify(self, path: Path, queue_pair: int, p_key: int) -> None:
        """A CNP is to go to the sender of a marked packet."""
        self._notices[Cnp(queue_pair, p_key)] = path

    def next_notice(self) -> Burst | None:
        """The next CNP; None when that is all. CNPs do not wait for the port: switches prefer them, too."""
        if not self._notices:
            return None
        cnp = next(iter(self._notices))
        path = self._notices.pop(cnp)
        raw = memoryview(cnp.encode(path.flow))
        return Burst(raw, len(raw), path.destination)

    def forget(self, wake: Callable[[], None]) -> None:
        self._waiting.pop(wake, None)

    def deadline(self, waits_for_port: bool) -> float | None:
        """When the next packets may go."""
        times = list(self._waiting.values())
        if waits_for_port:
            times.append(self.port_free_at)
        return min(times, default=None)

    def advance(self, now: float) -> None:
        """Wake the connections whose time has come."""
        for wake, at in list(self._waiting.items()):
            if at <= now:
                del self._waiting[wake]
                wake()
