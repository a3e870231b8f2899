"""The time that a command takes on an imitated drive, and its bytes on the imitated link of the enclosure.

No I/O, no clock; the same seed gives the same times.

A drive is one server for bandwidth and one for commands per second, with a latency on top: a command is done
`latency` after both servers have reached its end. With all at zero, the default, a command is done at once.
"""

import random
import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriveModelSettings:
    """What to imitate; 0 switches a part off.

    `jitter` spreads each latency evenly over latency * (1 - jitter) .. latency * (1 + jitter).
    """

    read_latency_s: float = 0.0
    write_latency_s: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    commands_per_s: float = 0.0
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("read_latency_s", "write_latency_s", "bandwidth_bytes_per_s", "commands_per_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a number of 0 or more")
        if not 0 <= self.jitter <= 1:
            raise ValueError("jitter must be between 0 and 1")

    @classmethod
    def of(
        cls, *, read_latency_ms: float, write_latency_ms: float, bandwidth_mib_s: float, iops: float,
        jitter: float = 0.0, seed: int = 0,
    ) -> "DriveModelSettings":  # fmt: skip
        """From the units of the command line."""
        bandwidth = bandwidth_mib_s * (1 << 20)
        return cls(read_latency_ms / 1000, write_latency_ms / 1000, bandwidth, iops, jitter, seed)

    @property
    def is_off(self) -> bool:
        """Whether there is nothing to imitate."""
        return not (
            self.read_latency_s or self.write_latency_s or self.bandwidth_bytes_per_s or self.commands_per_s
        )


class DriveModel:
    """The state of one imitated drive. Not thread-safe: the drive holds its lock around `due`."""

    def __init__(self, settings: DriveModelSettings) -> None:
        self.settings = settings
        self._random = random.Random(settings.seed)
        self._bandwidth_free_at = float("-inf")
        self._commands_free_at = float("-inf")

    def due(self, *, is_read: bool, length: int, now: float) -> float:
        """When a command of `length` bytes that arrives at `now` (seconds) is done."""
        settings = self.settings
        end = now
        if settings.bandwidth_bytes_per_s:
            start = max(now, self._bandwidth_free_at)
            self._bandwidth_free_at = start + length / settings.bandwidth_bytes_per_s
            end = max(end, self._bandwidth_free_at)
        if settings.commands_per_s:
            start = max(now, self._commands_free_at)
            self._commands_free_at = start + 1 / settings.commands_per_s
            end = max(end, self._commands_free_at)
        latency = settings.read_latency_s if is_read else settings.write_latency_s
        if latency and settings.jitter:
            latency *= 1 + settings.jitter * self._random.uniform(-1, 1)
        return end + latency


class LinkModel:
    """The link of an imitated enclosure: all its drives share it, and each way carries by itself.

    It carries the data of one command after another, while the drive works at it. Thread-safe.
    """

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        """0: as fast as the machine."""
        self._lock = threading.Lock()
        self._bytes_per_s = 0.0
        self._out_free_at = self._in_free_at = float("-inf")
        self.set_rate(bytes_per_s)

    def set_rate(self, bytes_per_s: float) -> None:
        """Carry what comes from now on at this rate, each way. ValueError: no rate."""
        if not 0 <= bytes_per_s < float("inf"):
            raise ValueError("the rate of a link must be a number of 0 or more")
        with self._lock:
            self._bytes_per_s = bytes_per_s

    def due(self, *, is_read: bool, length: int, now: float) -> float:
        """When `length` bytes that come at `now` (seconds) have been carried."""
        if not self._bytes_per_s:
            return now
        with self._lock:
            if not self._bytes_per_s:
                return now
            takes = length / self._bytes_per_s
            if is_read:
                self._out_free_at = max(now, self._out_free_at) + takes
                return self._out_free_at
            self._in_free_at = max(now, self._in_free_at) + takes
            return self._in_free_at
