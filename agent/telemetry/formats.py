"""In which format a scrape wants its answer: what we understand of its Accept header, and nothing else.

The application behind (prometheus_client) takes a version out of that header into the answer's own, unseen.
So a media range is handed on where it is one of those that a Prometheus sends, with parameters that we know;
of others it is not told, and a header of which nothing is left is answered in the plain format (RFC 9110,
12.5.1: a server may disregard the field).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Application: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""One of WSGI."""

ACCEPT_CHARACTERS_MAX = 1024
"""A Prometheus sends about 250."""

_RANGE = re.compile(
    r"[ \t]*(application/openmetrics-text|text/plain|[a-z*]+/[a-z*]+)[ \t]*"
    r"(;[ \t]*(version=(0\.0\.1|0\.0\.4|1\.0\.0)|q=[01](\.[0-9]{0,3})?|charset=utf-8"
    r"|escaping=(allow-utf-8|underscores|dots|values))[ \t]*)*"
)


def understood(accept: str) -> str:
    """The media ranges of an Accept header that we know."""
    if len(accept) > ACCEPT_CHARACTERS_MAX:
        return ""
    return ",".join(each for each in accept.split(",") if _RANGE.fullmatch(each))


def with_formats_we_know(application: Application) -> Application:
    """The same application, not told what we do not understand of an Accept header."""

    def asked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        accept = understood(str(environ.get("HTTP_ACCEPT", "")))
        return application({**environ, "HTTP_ACCEPT": accept}, start_response)

    return asked
