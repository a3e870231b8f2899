"""When a requester sends again, and when it gives up (IBTA 9.7.6).

The local ACK time-out and its retry counter decide about failure. The time-out suits the slowest network and
is seconds where the connection manager chooses it, which is long for one lost datagram. So unanswered packets
are sent again much earlier. These early repeats do not count as retries, and become rarer.

Both ends are processes, and either may get no processor for a while, which is no failure. Two rules follow
(decision 48). No time-out is shorter than `LEAST_TIMEOUT_S`, whatever the program asks for; adapters have a
minimum too. A time-out that this device notices late does not count, once in a row: the device itself was
absent, so it knows nothing of the peer's silence.
"""

import enum
from collections.abc import Callable
from typing import Final

from emulator.roce.nic.verbs import QpAttributes
from emulator.roce.wire.extended import RNR_TIMERS, ack_timeout_seconds, exponential_seconds

PROBE_S: Final = 0.02
"""Without an answer for so long, the first early repeat; then after twice the time, and so on."""

LEAST_TIMEOUT_S: Final = exponential_seconds(17)
"""The shortest ACK time-out of this device: 0.54 s. With seven retries a silent peer is given up after 4.3 s.
A ConnectX-2 has the same limit; IBTA 9.7.6.1.3 lets a device take up to four times the coded value anyway."""

LATE_S: Final = 0.02
"""A time-out that is found so much after its time is one that the device slept through."""

FOREVER: Final = 7
"""rnr_retry that never ends (IBTA 11.2.5.2)."""


def timeout_seconds(code: int) -> float | None:
    """The ACK time-out that this device takes for a code, in seconds; None for code 0: wait for ever."""
    coded = ack_timeout_seconds(code)
    return None if coded is None else max(coded, LEAST_TIMEOUT_S)


class Due(enum.Enum):
    """What time it is."""

    NOTHING = "nothing is due"
    RECEIVER_READY = "the wait that the receiver asked for is over"
    PROBE = "an early repeat"
    TIMEOUT = "the time-out"


class RetryClock:
    """Time-outs and counters of one requester. Times are seconds; `deadline` is None while nothing runs.

    While it runs it is a key of `running`, with the function to call at its time, so a device looks at no
    idle connection.
    """

    __slots__ = (
        "_attributes", "_call", "_excused", "_probe_wait", "_retries", "_rnr_retries", "_running", "_since",
        "_timer", "rnr_until",
    )  # fmt: skip

    def __init__(
        self,
        attributes: QpAttributes,
        running: "dict[RetryClock, Callable[[float], None]] | None" = None,
        call: Callable[[float], None] = lambda now: None,
    ) -> None:
        self._attributes = attributes
        self._running = running if running is not None else {}
        self._call = call
        self._since = self._probe_wait = 0.0
        self._timer: float | None = None
        self._excused = False
        self.rnr_until: float | None = None
        self.forget_failures()

    def forget_failures(self) -> None:
        """Something was answered: the counters are full again."""
        self._peer_is_there()
        self._rnr_retries = self._attributes.rnr_retry

    def _peer_is_there(self) -> None:
        self._retries = self._attributes.retry_count

    @property
    def deadline(self) -> float | None:
        """When something is due."""
        return self._timer if self.rnr_until is None else self.rnr_until

    @property
    def running(self) -> bool:
        """Whether an answer is waited for."""
        return self._timer is not None

    def restart(self, now: float) -> None:
        """The oldest packet without an answer is as old as `now`."""
        self.rnr_until = None
        self._since = now
        self._probe_wait = PROBE_S
        self._set(now)

    def stop(self) -> None:
        """There is nothing to wait for."""
        self._timer = self.rnr_until = None
        self._running.pop(self, None)

    def _set(self, now: float) -> None:
        timeout = timeout_seconds(self._attributes.timeout)
        probe = now + self._probe_wait
        self._timer = probe if timeout is None else min(probe, self._since + timeout)
        self._running[self] = self._call

    def advance(self, now: float) -> Due:
        """What is due; the clock then runs on for the next of it."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return Due.NOTHING
        if self.rnr_until is not None:
            self.stop()
            return Due.RECEIVER_READY
        timeout = timeout_seconds(self._attributes.timeout)
        if timeout is not None and now >= self._since + timeout:
            self._since = now
            # Once in a row, so that a device which is always late gives up as well, after twice the time.
            self._excused = not self._excused and now - deadline > LATE_S
            due = Due.PROBE if self._excused else Due.TIMEOUT
        else:
            self._probe_wait *= 2
            due = Due.PROBE
        self._set(now)
        return due

    def take_retry(self) -> bool:
        """Another try after a time-out or a sequence error; False if there is none left."""
        self._retries -= 1
        return self._retries >= 0

    def wait_for_receiver(self, timer: int, now: float) -> bool:
        """The receiver asks to wait, `timer` is its code; False if it has done so too often. It has answered,
        so the time-outs before are forgotten; its own counter goes on."""
        self._peer_is_there()
        if self._attributes.rnr_retry != FOREVER:
            self._rnr_retries -= 1
            if self._rnr_retries < 0:
                return False
        self._timer = None
        self.rnr_until = now + RNR_TIMERS[timer]
        self._running[self] = self._call
        return True
