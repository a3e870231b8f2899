"""Cuts a stream of JSON values without framing into values. No I/O.

A value ends where its outermost bracket closes. A value that is too long, nested too deeply, or neither an
object nor an array is refused before it is whole. MalformedStream is the only exception, and ends the stream.
"""

import json
import re
from typing import Any, Final, NoReturn

MESSAGE_BYTES_MAX: Final = 64 << 10
"""Of one value with the white space around it: the decoder holds the interpreter for up to 5 ms."""

NESTING_MAX: Final = 32
"""The deepest request has 4 levels: batch, request, parameters, namespace."""

_BLANKS: Final = re.compile(rb"[ \t\r\n]*")
_OUTSIDE: Final = re.compile(rb'["{}\[\]]')
_INSIDE: Final = re.compile(rb'["\\]')
_OPENING: Final = b"{["


class MalformedStream(ValueError):
    """Not a stream of JSON objects and arrays: the peer's fault."""


class JsonStream:
    """`push` takes received bytes and returns the values that are complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0  # up to here it is scanned
        self._depth = 0
        self._in_string = False

    def push(self, data: bytes) -> list[Any]:
        """Raises MalformedStream; values before the offending one are lost with it."""
        self._buffer += data
        values = []
        while (end := self._end_of_value()) is not None:
            values.append(_decode(bytes(self._buffer[:end])))
            del self._buffer[:end]
            self._at = 0
        if len(self._buffer) > MESSAGE_BYTES_MAX:
            raise MalformedStream(f"a message of more than {MESSAGE_BYTES_MAX} bytes")
        return values

    def _end_of_value(self) -> int | None:
        """Where the first value ends; None if it does not yet."""
        buffer = self._buffer
        if not self._depth:
            blanks = _BLANKS.match(buffer)
            start = blanks.end() if blanks is not None else 0
            del blanks  # it holds the buffer, which could not be cut
            del buffer[:start]
            self._at = 0
            if not buffer:
                return None
            if buffer[0] not in _OPENING:
                raise MalformedStream("neither an object nor an array")
        while (found := (_INSIDE if self._in_string else _OUTSIDE).search(buffer, self._at)) is not None:
            byte, self._at = found.group(), found.end()
            if byte == b"\\":
                if self._at == len(buffer):
                    self._at -= 1  # the escaped byte has not come
                    return None
                self._at += 1
            elif byte == b'"':
                self._in_string = not self._in_string
            elif byte in _OPENING:
                self._depth += 1
                if self._depth > NESTING_MAX:
                    raise MalformedStream(f"nested more than {NESTING_MAX} deep")
            else:
                self._depth -= 1
                if not self._depth:
                    return self._at
        self._at = len(buffer)
        return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _decode(text: bytes) -> Any:
    if len(text) > MESSAGE_BYTES_MAX:
        raise MalformedStream(f"a message of more than {MESSAGE_BYTES_MAX} bytes")
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_no_constant)
    except ValueError as error:
        raise MalformedStream(f"not JSON: {error}") from None
