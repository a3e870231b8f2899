"""When to try again, and when to give a controller up: a pure function of what happened so far."""

from __future__ import annotations

from dataclasses import dataclass

from nvmeof.errors import ConnectRefused
from nvmeof.limits import CONTROLLER_LOSS_S, RECONNECT_FIRST_S, RECONNECT_MOST_S


@dataclass(frozen=True, slots=True)
class ReconnectPolicy:
    """Back-off from `first_s`, doubled up to `most_s`; `loss_s` without a connection is the end."""

    first_s: float = RECONNECT_FIRST_S
    most_s: float = RECONNECT_MOST_S
    loss_s: float = CONTROLLER_LOSS_S


@dataclass(frozen=True, slots=True)
class History:
    """What happened since the connection was last good.

    `lost_at` is when it was lost (or first wanted); `failures` counts the tries since then;
    `ever_connected` tells a controller that has gone from one that never was; `tried_at` is when the last try
    began.
    """

    lost_at: float
    failures: int = 0
    ever_connected: bool = False
    error: Exception | None = None
    tried_at: float | None = None


def next_try(policy: ReconnectPolicy, history: History, now: float) -> float | None:
    """Seconds from now until the next try; None when the controller is to be given up.

    The first try after a loss is made at once. The others are so far apart from begin to begin: a try that
    hangs does not make the next one later. A refusal that will not change (a wrong name, a host that is not
    allowed) ends it only when we were never in: an enclosure that is being set up again refuses too.
    """
    refused = isinstance(history.error, ConnectRefused) and history.error.retry_is_useless
    if refused and not history.ever_connected:
        return None
    left = policy.loss_s - (now - history.lost_at)
    if left <= 0:
        return None
    if history.failures == 0:
        return 0.0
    # The exponent is bounded too: an enclosure may be away for days.
    delay = min(policy.first_s * 2.0 ** min(history.failures - 1, 30), policy.most_s)
    if history.tried_at is not None:
        delay = max(0.0, delay - (now - history.tried_at))
    return min(delay, left)
