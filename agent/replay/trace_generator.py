"""Making a trace that behaves like chat: conversations that grow, over system prompts that they share.

Sessions begin at random (a Poisson process) and take one of a few system prompts, the first ones far more
often. Every turn's input is the conversation so far and a new question. Full blocks of 512 tokens keep their
id from turn to turn; the last, partial one is another block with every turn.

Only `random()` is drawn, whose sequence Python keeps: the same seed makes the same trace everywhere.
"""

import heapq
import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from agent.replay.trace_lines import BLOCK_TOKENS, TraceRequest

SYSTEM_PROMPTS = 6
SYSTEM_PROMPT_BLOCKS = (2, 8)
SESSION_SECONDS = 2.0
"""Mean time between two beginnings of sessions."""
TURN_SECONDS = 25.0
"""Mean time between two turns of a session."""
TURNS = 4.0
"""Mean number of turns of a session."""
QUESTION_TOKENS = 700.0
ANSWER_TOKENS = 350.0
INPUT_TOKENS_MAX = 64 * BLOCK_TOKENS


@dataclass(slots=True)
class _Session:
    blocks: list[int]
    tokens: int
    turns_left: int = 1
    fresh: bool = field(default=True)


class TraceMaker:
    """Requests without end, in the order of their time."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._ids = itertools.count()
        shortest, longest = SYSTEM_PROMPT_BLOCKS
        self._prompts = [
            [next(self._ids) for _ in range(shortest + self._below(longest - shortest + 1))]
            for _ in range(SYSTEM_PROMPTS)
        ]

    def requests(self) -> Iterator[TraceRequest]:
        """The trace. Timestamps are whole milliseconds from 0 on."""
        tie = itertools.count()
        due: list[tuple[float, int, _Session]] = [(0.0, next(tie), self._new_session())]
        while True:
            now, _, session = heapq.heappop(due)
            if session.fresh:
                session.fresh = False
                heapq.heappush(due, (now + self._wait(SESSION_SECONDS), next(tie), self._new_session()))
            yield self._turn(session, now)
            if session.turns_left and session.tokens < INPUT_TOKENS_MAX:
                heapq.heappush(due, (now + self._wait(TURN_SECONDS), next(tie), session))

    def _new_session(self) -> _Session:
        # The square makes the first prompts popular: half of the sessions take one of the first two.
        prompt = self._prompts[int(self._dice.random() ** 2 * SYSTEM_PROMPTS)]
        turns = 1 + int(self._wait(TURNS - 1))
        return _Session(list(prompt), len(prompt) * BLOCK_TOKENS, turns)

    def _turn(self, session: _Session, now: float) -> TraceRequest:
        session.turns_left -= 1
        session.tokens += self._length(QUESTION_TOKENS)
        while len(session.blocks) < session.tokens // BLOCK_TOKENS:
            session.blocks.append(next(self._ids))
        partial = (next(self._ids),) if session.tokens % BLOCK_TOKENS else ()
        answer = self._length(ANSWER_TOKENS)
        request = TraceRequest(int(now * 1000), session.tokens, answer, (*session.blocks, *partial))
        session.tokens += answer
        return request

    def _below(self, bound: int) -> int:
        return int(self._dice.random() * bound)

    def _wait(self, mean: float) -> float:
        return -math.log(1.0 - self._dice.random()) * mean

    def _length(self, typical: float) -> int:
        """A number of tokens: log-normal, so that most are short and a few are long."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self._dice.random()))
        return max(1, int(typical * math.exp(0.8 * radius * math.cos(math.tau * self._dice.random()))))


def made_trace(seed: int, requests: int) -> Iterator[TraceRequest]:
    return itertools.islice(TraceMaker(seed).requests(), requests)


def encode_line(request: TraceRequest) -> str:
    """A request as a line of a trace file, without the newline."""
    record = {
        "timestamp": int(request.timestamp_ms),
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": list(request.hash_ids),
    }
    return json.dumps(record)
