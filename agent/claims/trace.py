"""A trace in memory, as numbers: its blocks by dense ids, and what each request asks.

The file is read line by line. What is kept is bounded: from `REFERENCES_MAX` block references on the rest of
the file is not read, and `Trace.is_whole` says so. A reference takes eight bytes here, a block some hundred
until the trace is read.
"""

import itertools
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agent.errors import UserError
from agent.replay.trace_lines import BLOCK_TOKENS, TraceFile

REFERENCES_MAX = 1 << 20
"""Block references that are played: three times those of the conversation trace of the Mooncake paper."""
_PROGRESS_REQUESTS = 256


@dataclass(slots=True)
class Trace:
    """Requests in order. Blocks of request n are `blocks[starts[n]:starts[n + 1]]`; lengths are tokens."""

    block_tokens: int
    blocks: "array[int]" = field(default_factory=lambda: array("I"))
    starts: "array[int]" = field(default_factory=lambda: array("I", [0]))
    inputs: "array[int]" = field(default_factory=lambda: array("Q"))
    outputs: "array[int]" = field(default_factory=lambda: array("Q"))
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    unique: int = 0
    is_whole: bool = True
    broken_lines: int = 0

    @property
    def requests(self) -> int:
        return len(self.inputs)

    @property
    def duration_s(self) -> float:
        """From the first to the last request; a second where there is no time between them."""
        return max(self.seconds[-1] - self.seconds[0], 1.0)

    @property
    def mean_context(self) -> int:
        """Tokens of the prompt that a prompt token is in, on average: long prompts count by their length."""
        total = sum(self.inputs)
        return max(1, sum(length * length for length in self.inputs) // max(1, total))

    def tokens_of(self, request: int, blocks: int) -> int:
        """Tokens in the first blocks of a request; the last block of a prompt is rarely full."""
        return min(blocks * self.block_tokens, self.inputs[request])

    def used_again_share(self) -> float:
        """Share of the different blocks that are asked for more than once."""
        seen, again = bytearray(self.unique), bytearray(self.unique)
        for block in self.blocks:
            again[block] |= seen[block]
            seen[block] = 1
        return sum(again) / max(1, self.unique)


def read_trace(
    path: Path, progress: Callable[[float], None] = lambda share: None, requests: int = 0
) -> Trace:
    """The trace of a file, or its first `requests` (0: all). `progress` hears which share of the file was
    read. Raises UserError."""
    file = TraceFile(path, False, requests, fitting=True)
    dense: dict[int, int] = {}
    trace = Trace(BLOCK_TOKENS)
    for number, request in enumerate(file):
        trace.block_tokens = request.block_tokens
        trace.blocks.extend(dense.setdefault(block, len(dense)) for block in request.hash_ids)
        trace.starts.append(len(trace.blocks))
        trace.inputs.append(request.input_length)
        trace.outputs.append(request.output_length)
        trace.seconds.append(request.timestamp_ms / 1000)
        if number % _PROGRESS_REQUESTS == 0:
            progress(file.share_read)
        if len(trace.blocks) >= REFERENCES_MAX:
            trace.is_whole = False
            break
    if not trace.blocks or not any(trace.inputs):
        why = (
            f"; the first of {file.broken_lines} broken lines: {file.complaints[0]}"
            if file.complaints
            else ""
        )
        raise UserError(
            f"{path} has no request with blocks and tokens{why}",
            "a trace is JSON lines in Mooncake's format; `g35 trace generate` makes one",
        )
    trace.unique, trace.broken_lines = len(dense), file.broken_lines
    return trace


def next_requests(trace: Trace) -> "array[int]":
    """For each block reference the number of the next request with the same block; the number of requests
    where there is none."""
    never = trace.requests
    upcoming = array("I", itertools.repeat(never, trace.unique))
    found = array("I", itertools.repeat(never, len(trace.blocks)))
    for request in range(trace.requests - 1, -1, -1):
        references = range(trace.starts[request], trace.starts[request + 1])
        for at in references:
            found[at] = upcoming[trace.blocks[at]]
        for at in references:
            upcoming[trace.blocks[at]] = request
    return found
