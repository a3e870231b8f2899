"""What an operation answers: a status, headers and a document, or an object's bytes as they are read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from agent.s3 import xml_out


class BrokenOff(Exception):
    """The rest of a body cannot be had. The connection ends, short of what it announced."""


Send = Callable[[memoryview], Awaitable[None]]


class Stream(Protocol):
    """The bytes of an answer."""

    @property
    def length(self) -> int: ...

    async def send(self, send: Send) -> None:
        """Send all of them, and let go of what they came from. Raises BrokenOff."""

    async def close(self) -> None:
        """Let go without having sent; after `send` it does nothing."""


@dataclass(slots=True)
class Answer:
    """`length` is told where nothing of that length is sent, as to HEAD."""

    status: int = 200
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    stream: Stream | None = None
    length: int | None = None


def xml_answer(name: str, content: xml_out.Content) -> Answer:
    return Answer(200, [("content-type", "application/xml")], xml_out.document(name, content))
