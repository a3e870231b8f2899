"""Every bound of nvmeof in one place, with the reason for its size.

Wire formats have bounds of their own (a 16-bit command id); these are the ones we chose.
"""

STAGING_BYTES = 32 << 10
"""Read-ahead for PDU headers. Many short PDUs arrive with one system call, whose payloads are copied once
more, from here to their places: a copy of some KiB takes less time than another call."""

LONG_AHEAD_BYTES = 512
"""The same while a payload beyond `SHORT_PAYLOAD_BYTES` is awaited: at most this much of it is copied."""

SHORT_PAYLOAD_BYTES = 16 << 10
"""Of a PDU that is read with others."""

EXPECTED_BYTES = 1 << 20
"""Of answers that one call may receive straight into their places, as many as a reader asks for together."""

UNEXPECTED_ANSWERS = 64
"""After the order of a controller's answers was another than that of its commands, so many come before the
host goes by that order again: each such error costs a copy of up to `EXPECTED_BYTES`."""

MAX_HEADER_DATA_OFFSET = 256
"""Largest PDO that we accept. PDA allows up to 128 bytes of alignment; more is nonsense."""

MAX_PDU_DATA = 1 << 31
"""Largest payload of one PDU that the framing accepts; the owner checks it against the command."""

MAX_TERMINATION_BYTES = 152
"""A termination request carries at most 128 bytes of the header that was wrong."""


MAX_QUEUE_DEPTH = 1024
"""Commands in flight on one queue; command ids are dealt from this range."""

ADMIN_QUEUE_DEPTH = 32
"""NVMF_AQ_DEPTH of other implementations too; also the least that the specification allows."""

ADMIN_COMMANDS = 12
"""Admin commands of the owner in flight at once; the rest wait. With an abort for each of them, event
requests, a keep-alive and a scan of the namespaces they fit into the admin queue."""

SESSION_EVENTS = 64
"""Events of a session that wait to be read; when nobody reads them, further ones are dropped. The state
that they tell of is always up to date in the controller object itself."""

MAX_DISCOVERY_ENTRIES = 1024
"""Entries of a discovery log that we read."""

DISCARD_BYTES = 256 << 10
"""Where data for an abandoned command goes. It is overwritten in pieces of this size."""

MIN_MAXH2CDATA = 4096
"""A controller may not announce less (NVMe/TCP 1.0, 3.6.2.3)."""

MAX_OUTSTANDING_R2T = 1
"""R2Ts per command that we allow the controller. One, as Linux: with large R2Ts more bring nothing."""


CONNECT_TIMEOUT_S = 10.0
"""Connecting and bringing a controller up, all of it."""

ADMIN_TIMEOUT_S = 10.0
"""An admin command unanswered for this long is aborted; after as long again the connection is given up. While
a controller is brought up or reset, and for the connection and its initialization, once is enough."""

AUTHENTICATION_ANSWER_S = 10.0
"""The same for an authentication command, whose answer may wait for long arithmetic at the controller."""

KEEP_ALIVE_S = 10.0
"""KATO. Keep Alive is sent at half of it."""

SHUTDOWN_TIMEOUT_S = 3.0
"""How long a goodbye may take before we hang up without one."""

RECONNECT_FIRST_S = 0.1
RECONNECT_MOST_S = 5.0
"""Back-off between tries to reconnect: doubled from the first to the most."""

CONTROLLER_LOSS_S = 600.0
"""After this long without a connection a controller is declared lost (ctrl_loss_tmo of Linux)."""

AUTHENTICATION_S = 30.0
"""How long a host may take to authenticate a queue, from Connect (or its AUTH_Negotiate) to the last message.
Linux as a target allows the keep-alive time, or two minutes."""
