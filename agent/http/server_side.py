"""The server's side of HTTP/1.1, with a short way for plain requests.

h11 has the protocol. A request without a body and its answer take it 70 us of processor time where nothing
else runs, and several times that in a busy process; the short way takes 10. Most heads come whole, and say
how long the body is, or announce none. Those are read and answered here, through the states that h11 would go
through. Every other head goes to h11 as it came: what is malformed, pipelined, in parts, of another version
or with a body in HTTP's chunks, h11 judges.
"""

import re
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import h11

from agent.telemetry.http_connection import LINEAR, http_connection

Pair: TypeAlias = tuple[bytes, bytes]
State: TypeAlias = type[object]
"""One of h11's, whose own type has no public name."""

_REQUEST_LINE = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) ([!-~]+) HTTP/1\.1")
_FIELD = LINEAR["header_field_re"]
"""h11's pattern of a line: this takes no line that h11 would refuse, nor another value of it."""
_FIELD_OUT = re.compile(rb"[-!#$%&'*+.^_`|~0-9a-zA-Z]++: (?:[^\x00\s]++(?:[ \t]++[^\x00\s]++)*+)?+")
"""What h11 lets out."""
_LENGTH = re.compile(rb"[0-9]{1,15}")
_FOR_H11: Final = frozenset({b"expect", b"transfer-encoding", b"upgrade"})
PLAIN_LINES_MAX: Final = 64
"""Of a head. What is to be refused for its many lines is h11's, too."""
_END: Final = h11.EndOfMessage()
_WITHOUT_BODY: Final = frozenset({204, 304})


class PlainRequest(NamedTuple):
    """A request with a body of known length, or none, with what the doors read of `h11.Request`."""

    method: bytes
    target: bytes
    headers: Sequence[Pair]
    """Names in lower case."""


Request: TypeAlias = h11.Request | PlainRequest
Event: TypeAlias = h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED] | PlainRequest


class PlainHead(NamedTuple):
    request: PlainRequest
    size: int
    """Of the head, in bytes, with the empty line at its end."""
    length: int
    """Of the body that follows."""


def plain_head(data: bytes) -> PlainHead | None:
    """The head that `data` begins with, where it is plain and no other request follows; None where h11 has to
    look."""
    end = data.find(b"\r\n\r\n")
    if end < 0 or data.count(b"\n", 0, end) > PLAIN_LINES_MAX:
        return None
    lines = data[:end].split(b"\r\n")
    first = _REQUEST_LINE.fullmatch(lines[0])
    if first is None:
        return None
    headers: list[Pair] = []
    hosts = 0
    length = -1
    for line in lines[1:]:
        # An empty line, behind which there would be a body or another request, is no field either.
        field = _FIELD.fullmatch(line)
        if field is None:
            return None
        name, value = field[1].lower(), field[2]
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            if length >= 0 or _LENGTH.fullmatch(value) is None:
                return None
            length = int(value)
        elif name in _FOR_H11 or (name == b"connection" and value.lower() != b"keep-alive"):
            return None
        headers.append((name, value))
    size, length = end + 4, max(length, 0)
    if hosts != 1 or len(data) > size + length:
        return None
    return PlainHead(PlainRequest(first[1], first[2], headers), size, length)


class ServerSide:
    """What doors use of `h11.Connection`. Without I/O. An answer to a plain request is made by `head`, `data`
    and `end`; so are all others."""

    def __init__(self, head_bytes_max: int) -> None:
        self._h11 = http_connection(head_bytes_max)
        self._is_fresh = True
        """h11 has no byte of the next request."""
        self._whole = b""
        """A plain head that was received and not looked at, with the bytes of its body that came with it."""
        self._head_size = 0
        self._request: PlainRequest | None = None
        """The plain request that is being answered, or is next."""
        self._theirs: State = h11.IDLE
        self._ours: State = h11.IDLE
        self._body_length = self._body_left = 0
        """Of the body of the plain request: announced, and still to be received."""
        self._body: deque[bytes] = deque()
        """Of the body, received and not looked at."""
        self._is_ended = False
        """The client has sent all that it will send, amid a body."""
        self._behind = b""
        """Bytes behind the body of a plain request: h11 has them next."""
        self._left = 0
        """Of the body of the answer to a plain request."""

    def receive_data(self, data: bytes) -> None:
        """As h11's. Raises RemoteProtocolError."""
        if self._request is not None and not self._whole:
            self._receive_body(data)
            return
        if self._is_fresh and self._request is None:
            plain = plain_head(data)
            if plain is not None:
                self._whole = data
                self._request, self._head_size, self._body_length = plain
                return
        self._is_fresh = False
        if self._whole:
            # More bytes before the head was looked at: all of it is h11's.
            self._h11.receive_data(self._whole)
            self._whole, self._request = b"", None
        self._h11.receive_data(data)

    def _receive_body(self, data: bytes) -> None:
        """Bytes behind the head of a plain request that was looked at."""
        if not data:
            self._is_ended = True
            return
        taken = data[: self._body_left]
        if taken:
            self._body.append(taken)
            self._body_left -= len(taken)
        self._behind += data[len(taken) :]

    @property
    def trailing_data(self) -> bytes:
        """What was received and not looked at."""
        return self._whole or b"".join((*self._body, self._behind)) or self._h11.trailing_data[0]

    def next_event(self) -> Event:
        """As h11's. Raises RemoteProtocolError."""
        if self._request is None:
            return self._h11.next_event()
        if self._whole:
            body, self._whole = self._whole[self._head_size :], b""
            self._theirs, self._ours = h11.SEND_BODY, h11.SEND_RESPONSE
            self._body_left = self._body_length
            if body:
                self._receive_body(body)
            return self._request
        if self._theirs is not h11.SEND_BODY:
            return h11.PAUSED
        if self._body:
            return h11.Data(data=self._body.popleft())
        if not self._body_left:
            self._theirs = h11.DONE
            return _END
        if self._is_ended:
            came = self._body_length - self._body_left
            raise h11.RemoteProtocolError(f"the client left after {came} of {self._body_length} bytes")
        return h11.NEED_DATA

    @property
    def they_are_waiting_for_100_continue(self) -> bool:
        return self._request is None and self._h11.they_are_waiting_for_100_continue

    @property
    def our_state(self) -> State:
        return self._h11.our_state if self._request is None else self._ours

    @property
    def their_state(self) -> State:
        return self._h11.their_state if self._request is None else self._theirs

    def go_on(self) -> bytes:
        """100 Continue."""
        return self._h11.send(h11.InformationalResponse(status_code=100, headers=[])) or b""

    def head(self, status: int, reason: bytes, headers: Sequence[Pair]) -> bytes:
        """The head of an answer; one with a body has a content-length. Raises LocalProtocolError."""
        if self._request is None:
            response = h11.Response(status_code=status, headers=list(headers), reason=reason)
            return self._h11.send(response) or b""
        if self._ours is not h11.SEND_RESPONSE:
            raise h11.LocalProtocolError("an answer has one head")
        lines = [b"HTTP/1.1 %d %s" % (status, reason)]
        closes, left = False, 0
        for name, value in headers:
            line = name + b": " + value
            if _FIELD_OUT.fullmatch(line) is None:
                raise h11.LocalProtocolError("a header of an answer is none")
            lines.append(line)
            if name == b"content-length":
                left = int(value)
            closes |= name == b"connection"
        self._ours = h11.SEND_BODY
        self._left = 0 if status in _WITHOUT_BODY or self._request.method == b"HEAD" else left
        if closes:
            self._theirs = h11.MUST_CLOSE
        return b"\r\n".join((*lines, b"", b""))

    def data(self, data: bytes | memoryview) -> Sequence[bytes | memoryview]:
        """Bytes of the body as they go out, not copied. Raises LocalProtocolError."""
        if self._request is None:
            # h11 takes what has a length.
            return self._h11.send_with_data_passthrough(h11.Data(data=data)) or ()  # type: ignore[arg-type]
        if self._ours is not h11.SEND_BODY or len(data) > self._left:
            raise h11.LocalProtocolError("a body is longer than its head says")
        self._left -= len(data)
        return (data,) if data else ()

    def end(self) -> bytes:
        """The end of the answer. Raises LocalProtocolError."""
        if self._request is None:
            return self._h11.send(_END) or b""
        if self._ours is not h11.SEND_BODY or self._left:
            raise h11.LocalProtocolError("a body is shorter than its head says")
        self._ours = h11.DONE
        return b""

    def may_go_on(self) -> bool:
        """Whether there may be another request on this connection: the next is expected then."""
        if self.their_state is not h11.DONE or self.our_state is not h11.DONE:
            return False
        if self._request is not None:
            self._request = None
            self._theirs = self._ours = h11.IDLE
            behind, self._behind, self._is_ended = self._behind, b"", False
            if behind:
                self.receive_data(behind)
        else:
            self._h11.start_next_cycle()
            self._is_fresh = not self._h11.trailing_data[0]
        return True
