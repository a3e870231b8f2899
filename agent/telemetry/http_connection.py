"""h11's connection with every pattern linear, for the listeners of this package.

h11 reads a head, a chunk's first line and a trailer by regular expressions. In three places two neighbouring
repeats match the same blanks: a line of n blanks costs n * n steps, and holds the interpreter (16 KiB without
a key: 1.6 s). The patterns here match the same lines and never go back into a repeat. h11 has no seam for
that, so they replace its own.
"""

import re
from typing import Final

import h11
from h11 import _readers

LINEAR: Final = {
    "header_field_re": re.compile(
        rb"(?P<field_name>[-!#$%&'*+.^_`|~0-9a-zA-Z]+):[ \t]*+"
        rb"(?P<field_value>(?:[^\x00\s]++(?:[ \t]++[^\x00\s]++)*+)?+)[ \t]*+"
    ),
    "chunk_header_re": re.compile(
        rb"(?P<chunk_size>[0-9A-Fa-f]{1,20}+)(?:(?P<chunk_ext>;[^\n]*)|[ \t]*+)\r\n"
    ),
}
"""Patterns by their names in `h11._readers`: RFC 9112, 5 (fields) and 7.1 (chunks), as h11 reads them."""


def _install() -> None:
    for name, pattern in LINEAR.items():
        if not isinstance(getattr(_readers, name, None), re.Pattern):
            raise ImportError(f"this version of h11 has no {name}", name="h11")
        setattr(_readers, name, pattern)


_install()


def http_connection(head_bytes_max: int) -> h11.Connection:
    """A server's side of a connection. `head_bytes_max`: of a head that is not complete, in bytes."""
    return h11.Connection(h11.SERVER, max_incomplete_event_size=head_bytes_max)
