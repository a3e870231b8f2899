"""Reading a trace: JSON lines, one request each, in Mooncake's format.

    {"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, …]}

`timestamp` is in milliseconds from the start; `hash_ids` names the blocks of the request's prefix, in order.
A block has 512 tokens, or as many as the line's `block_size` says, which is the same in all lines of a trace.
Lines are untrusted and read one at a time. A broken one is counted and skipped, with its number and reason,
or ends the reading (`strict`). A file whose name ends in .xz is unpacked line by line.
"""

import json
import lzma
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from agent.errors import UserError
from agent.host_os.fifo import open_to_read

BLOCK_TOKENS = 512
"""Of a block, in a trace whose lines have no `block_size`."""
BLOCK_TOKENS_MAX = 1 << 20
LINE_BYTES_MAX = 1 << 20
BLOCKS_MAX = 1 << 16
"""In one request: 33 million tokens of prefix."""
HASH_ID_MAX = (1 << 128) - 1
COMPLAINTS_KEPT = 20


class BrokenLine(Exception):
    """A line is no request; the text says why."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it came (milliseconds), its lengths in tokens, and its blocks."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_tokens: int = BLOCK_TOKENS

    def tokens_of(self, blocks: int) -> int:
        """Tokens in the first `blocks` blocks; the last block of a prefix is rarely full."""
        return min(blocks * self.block_tokens, self.input_length)


def decode_line_untrusted(line: bytes) -> TraceRequest:
    """A request out of one line. Raises BrokenLine, and nothing else, for bad bytes."""
    # json.loads takes bytes for UTF-16 or UTF-32 where some of them are NUL, and would complain about that.
    at = line.find(b"\0")
    if at >= 0:
        raise BrokenLine(f"a NUL byte at column {at + 1}; traces are UTF-8 text")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise BrokenLine(f"no UTF-8 at column {error.start + 1}: {error.reason}") from None
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenLine(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BrokenLine("no JSON object")
    timestamp = _number(found, "timestamp", fraction=True)
    input_length = int(_number(found, "input_length"))
    output_length = int(_number(found, "output_length"))
    hash_ids = found.get("hash_ids")
    if not isinstance(hash_ids, list) or len(hash_ids) > BLOCKS_MAX:
        raise BrokenLine(f"hash_ids is no list of at most {BLOCKS_MAX} numbers")
    for hash_id in hash_ids:
        if type(hash_id) is not int or not 0 <= hash_id <= HASH_ID_MAX:
            raise BrokenLine("hash_ids has something else than a number of at most 128 bits")
    block_tokens = found.get("block_size", BLOCK_TOKENS)
    if type(block_tokens) is not int or not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
        raise BrokenLine(f"block_size is no number from 1 to {BLOCK_TOKENS_MAX}")
    return TraceRequest(timestamp, input_length, output_length, tuple(hash_ids), block_tokens)


def _number(record: dict[Any, Any], name: str, *, fraction: bool = False) -> float:
    value: Any = record.get(name)
    kinds = (int, float) if fraction else (int,)
    if type(value) not in kinds or not 0 <= value < 1 << 53:
        raise BrokenLine(f"{name} is no number from 0 on" if name in record else f"{name} is missing")
    return float(value) if fraction else int(value)


@dataclass(slots=True)
class TraceFile:
    """A trace on disk; iterate over it once. `requests_max` 0 means all of it."""

    path: Path
    strict: bool = False
    requests_max: int = 0
    fitting: bool = False
    """A prompt that ends before its last block begins is broken: for readers whom tokens matter to."""
    requests: int = 0
    broken_lines: int = 0
    complaints: list[str] = field(default_factory=list)
    """The first few broken lines: number and reason."""
    finished: bool = False
    block_tokens: int = 0
    """Of the first request; 0 before it was read."""
    share_read: float = 0.0
    """How much of the file's bytes was read."""

    def __iter__(self) -> Iterator[TraceRequest]:
        try:
            raw = open_to_read(self.path)
        except OSError as error:
            raise UserError(
                f"cannot read the trace {self.path}: {error.strerror}", "`g35 trace generate` makes one"
            ) from None
        with raw:
            try:
                yield from self._requests(raw)
            except (lzma.LZMAError, EOFError) as error:
                raise UserError(
                    f"{self.path} cannot be unpacked: {error}", "is it an .xz file, and all of it?"
                ) from None

    def _requests(self, raw: IO[bytes]) -> Iterator[TraceRequest]:
        found = os.fstat(raw.fileno())
        if stat.S_ISCHR(found.st_mode):
            raise UserError(f"{self.path} is a device and no trace", "`g35 trace generate` makes one")
        size = found.st_size
        with lzma.open(raw) if self.path.suffix == ".xz" else raw as file:
            number = 0
            while not self.requests_max or self.requests < self.requests_max:
                line = file.readline(LINE_BYTES_MAX)
                self.share_read = raw.tell() / size if size else 1.0
                if not line:
                    break
                number += 1
                too_long = len(line) == LINE_BYTES_MAX and not line.endswith(b"\n")
                while too_long and line and not line.endswith(b"\n"):
                    line = file.readline(LINE_BYTES_MAX)
                if not too_long and not line.strip():
                    continue
                try:
                    if too_long:
                        raise BrokenLine(f"longer than {LINE_BYTES_MAX} bytes")
                    request = self._like_the_first(decode_line_untrusted(line))
                except BrokenLine as broken:
                    self._complain(number, str(broken))
                    continue
                self.requests += 1
                yield request
        self.finished = True

    def _like_the_first(self, request: TraceRequest) -> TraceRequest:
        """Raises BrokenLine where the blocks have another size, said or seen: ids would mean other tokens."""
        self.block_tokens = self.block_tokens or request.block_tokens
        if request.block_tokens != self.block_tokens:
            raise BrokenLine(
                f"blocks of {request.block_tokens} tokens; those of the first request have "
                f"{self.block_tokens}"
            )
        blocks = len(request.hash_ids)
        if self.fitting and blocks and (blocks - 1) * self.block_tokens >= request.input_length:
            raise BrokenLine(
                f"{blocks} blocks of {self.block_tokens} tokens are more than a prompt of "
                f"{request.input_length}; lines of a trace with smaller blocks say so: block_size"
            )
        return request

    def _complain(self, number: int, why: str) -> None:
        complaint = f"line {number}: {why}"
        if self.strict:
            raise UserError(
                f"{self.path}, {complaint}", "without --strict, broken lines are counted and skipped"
            )
        self.broken_lines += 1
        if len(self.complaints) < COMPLAINTS_KEPT:
            self.complaints.append(complaint)


def block_tokens_of(path: Path) -> int:
    """Tokens of a block of this trace, by its first request. Raises UserError where it cannot be read."""
    return next((request.block_tokens for request in TraceFile(path, requests_max=1)), BLOCK_TOKENS)
