"""The XML documents of answers."""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, TypeAlias, Union
from urllib.parse import quote
from xml.sax.saxutils import escape

NAMESPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"
UNFIT: Final = re.compile(r"[\x00-\x1f\x7f\ufffe\uffff]")
"""Characters that XML 1.0 cannot carry, or nobody could read."""
_DECLARATION: Final = '<?xml version="1.0" encoding="UTF-8"?>\n'

Content: TypeAlias = Union[str, int, bool, "Iterable[Element]"]
Element: TypeAlias = tuple[str, Content | None]
"""A name, and text or further elements; one with None is left out."""


def document(name: str, content: Content, rows: Sequence[bytes] = (), *, bare: bool = False) -> bytes:
    """A whole document, with `rows` already written; `bare` without S3's namespace, as errors are."""
    root = name if bare else f'{name} xmlns="{NAMESPACE}"'
    head = f"{_DECLARATION}<{root}>{written(content)}"
    return b"".join([head.encode(), *rows, f"</{name}>".encode()])


def written(content: Content) -> str:
    if isinstance(content, bool):
        return "true" if content else "false"
    if isinstance(content, str | int):
        return escape(str(content))
    return "".join(f"<{name}>{written(inner)}</{name}>" for name, inner in content if inner is not None)


def error(
    code: str, message: str, resource: str, request_id: str, details: Sequence[tuple[str, str]] = ()
) -> bytes:
    """The document of a refusal; characters of the request that XML cannot carry are replaced."""
    message, resource = (UNFIT.sub("\ufffd", text) for text in (message, resource))
    fields = [("Code", code), ("Message", message), *details]
    fields += [("Resource", resource), ("RequestId", request_id)]
    return document("Error", fields, bare=True)


def shown(text: str, encoding: str) -> str:
    """A key or a prefix, as `encoding-type` wants it."""
    return quote(text, safe="/~") if encoding == "url" else text


def iso_time(nanoseconds: int) -> str:
    return f"{_second(nanoseconds // 1_000_000_000)}.{nanoseconds // 1_000_000 % 1000:03d}Z"


@lru_cache(256)
def _second(seconds: int) -> str:
    """Objects that were written together share it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
