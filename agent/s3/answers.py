"""Answers: a status, headers and a document, or an object's bytes as they are read."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from agent.s3 import xml_out

Send = Callable[[memoryview], Awaitable[None]]


class Stream(Protocol):
    @property
    def length(self) -> int: ...

    async def send(self, send: Send) -> None:
        """Send all of them, and close. Raises BrokenOff."""

    async def close(self) -> None:
        """Release the object. Idempotent."""


@dataclass(slots=True)
class Answer:
    """`length`: the announced one, where it is not that of `body` (HEAD). `unsent`: what is left of head and
    body where the thread that read the body has begun to send them; then `stream` is only to be closed."""

    status: int = 200
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    stream: Stream | None = None
    length: int | None = None
    unsent: list[bytes | memoryview] | None = None


SendAtOnce: TypeAlias = Callable[[Answer, memoryview], None]
"""Send an answer whose whole body is there, as far as its client takes it at once; `unsent` is the rest."""


def xml_answer(name: str, content: xml_out.Content, rows: Sequence[bytes] = ()) -> Answer:
    return Answer(200, [("content-type", "application/xml")], xml_out.document(name, content, rows))
