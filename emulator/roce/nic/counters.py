"""Counters of a device: dropped packets by cause, and repetitions.

`wire/malformed.py` has the causes that a packet's form shows; these here need a queue pair.
"""

from enum import StrEnum


class Count(StrEnum):
    """The names in `Nic.counters`."""

    PACKETS_IN = "packets in"
    BURSTS_OUT = "bursts out"
    ROW_PACKETS = "packets in rows"
    """Of those that came in, how many took the fast path."""

    STRANGE_SOURCE = "strange source"
    """No address that a queue pair could have for its peer."""
    NO_QUEUE_PAIR = "no queue pair"
    NO_GROUP = "no multicast group"
    """A multicast packet for a group that no queue pair is attached to."""
    WRONG_SERVICE = "wrong service"
    """An RC packet for a UD queue pair, or the other way round."""
    NOT_READY = "queue pair not ready"
    """Its state does not let it receive."""
    WRONG_PEER = "wrong peer"
    """An RC packet from another address than the peer's."""
    WRONG_PKEY = "wrong p_key"
    WRONG_QKEY = "wrong q_key"
    MTU = "longer than the path mtu"
    NO_RECEIVE = "no receive posted"
    MESSAGE_LOST = "unreliable message lost"
    """A packet of an unreliable connection that is part of no message that can be received whole."""
    BUFFER_TOO_SMALL = "receive buffer too small"
    DUPLICATE = "duplicate request"
    OUT_OF_SEQUENCE = "request out of sequence"
    GHOST = "ghost answer"
    """An answer to nothing that is under way."""
    NO_RESOURCE = "duplicate without its resource"
    LOST_RESPONSE = "response missing"
    EVENTS_LOST = "asynchronous events lost"

    NAK_SENT = "nak sent"
    RNR_NAK_SENT = "rnr nak sent"
    NAK_RECEIVED = "nak received"
    RNR_NAK_RECEIVED = "rnr nak received"
    TIMEOUTS = "time-outs"
    PROBES = "early retransmissions"

    CE_IN = "packets marked congestion experienced"
    """Valid packets of connections that a switch marked on their way (ECN)."""
    CNP_SENT = "cnp sent"
    CNP_HANDLED = "cnp handled"
    CNP_IGNORED = "cnp ignored"
    """For no connection of its sender's, or damaged."""
