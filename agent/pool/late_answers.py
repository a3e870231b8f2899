"""The rule of late answers: an answer that has not arrived by its deadline is a miss.

The wait ends at the deadline, the command is abandoned, and the cause is `MissCause.LATE`. What arrives
later is thrown away: nothing is written into the buffer of a command that was abandoned. A fault that
arrives in time is a miss as well, with a cause of its own (`fault_cause`).

How long a deadline is, the operator sets (agent/pool/volume/settings.py). Which namespaces are not asked
after late answers is a matter of agent/remote/circuit_breaker.py.
"""

from agent.pool.counters import MissCause
from agent.pool.steps import IoChannel, Pending, Steps, Wait


def wait_for(
    channel: IoChannel, pending: Pending, deadline: float, at_least: int | None = None
) -> Steps[MissCause | None]:
    """Wait for a read or write; None once it (or `at_least` bytes of it) has arrived, else why it is a miss.

    What is late is abandoned, so its buffer is the caller's own again.
    """
    arrived = has_arrived(pending, at_least) or (yield Wait(pending, deadline, at_least))
    return miss_cause_of(channel, pending, arrived)


def has_arrived(pending: Pending, at_least: int | None = None) -> bool:
    """Whether it is over, or `at_least` bytes of it are there: then there is nothing to wait for."""
    return pending.done or (at_least is not None and pending.received >= at_least)


def miss_cause_of(channel: IoChannel, pending: Pending, arrived: bool) -> MissCause | None:
    """After a wait: None where the answer has arrived and is good. A late one is abandoned here."""
    if not arrived:
        channel.abandon(pending)
        return MissCause.LATE
    if pending.fault is None:
        return None
    return fault_cause(pending)


def fault_cause(pending: Pending) -> MissCause:
    """A fault as a miss cause: no way there is the enclosure's absence, a media error is damage."""
    return MissCause.ENCLOSURE_DOWN if pending.unreachable else MissCause.CORRUPT
