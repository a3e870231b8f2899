"""The requests of a simulated pod: a trace at its pace or another, or a workload that is made up.

Only `random()` is drawn, whose sequence Python keeps, and times are whole microseconds: the same seed makes
the same requests on any machine.
"""

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from agent.errors import UserError, did_you_mean
from agent.replay.trace_lines import BLOCK_TOKENS, TraceFile
from agent.sim.pod_plan import PodPlan

INPUT_TOKENS_MAX: Final = 128 << 10
FIRST_SESSIONS_MAX: Final = 1 << 17
"""Sessions that are under way when a workload begins."""


class Kind(NamedTuple):
    """Sessions of one kind. `shared`: how many beginnings (system prompts, documents) they choose from; the
    rest are means: tokens, turns, seconds between turns."""

    shared: int
    beginning: float
    turns: float
    pause: float
    question: float
    answer: float

    @property
    def later_turns(self) -> float:
        """How many turns follow the first one, on average: whole ones, of an exponential distribution."""
        return 1.0 / math.expm1(1.0 / (self.turns - 1.0))


KINDS: Final = {
    "chat": Kind(50, 1_500, 5.0, 8.0, 700, 350),
    "agents": Kind(20, 8_000, 15.0, 1.5, 1_200, 150),
    "documents": Kind(400, 30_000, 3.0, 6.0, 120, 300),
}
MIXED: Final = "mixed"
WORKLOADS: Final = (*KINDS, MIXED)


class Request(NamedTuple):
    """One request. `at`: seconds from the start."""

    number: int
    at: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    block_tokens: int

    def tokens_of(self, blocks: int) -> int:
        """Tokens of the first blocks; the last one is rarely full."""
        return min(blocks * self.block_tokens, self.input_tokens)


@dataclass(slots=True)
class _Session:
    kind: Kind
    blocks: list[int]
    tokens: int
    turns: int


def check_workload(workload: str) -> None:
    """Raises UserError for one that is not known."""
    if workload not in WORKLOADS:
        known = ", ".join(WORKLOADS)
        raise UserError(f"no workload {workload!r}{did_you_mean(workload, WORKLOADS)}", f"there are {known}")


class MadeRequests:
    """Requests without end, `rate` of them a second from the start.

    As many sessions as are between two turns at that rate begin with the workload, each within a pause; from
    then on as many begin as end. `pace` 2: the requests come twice as fast.
    """

    def __init__(
        self, workload: str, seed: int, rate: float, block_tokens: int = BLOCK_TOKENS, pace: float = 1.0
    ) -> None:
        check_workload(workload)
        self._kinds = list(KINDS.values()) if workload == MIXED else [KINDS[workload]]
        self._dice = random.Random(f"workload {seed}")
        self._rate = rate
        self._pace = pace
        self._block_tokens = block_tokens
        self._ids = itertools.count()
        self._beginnings: dict[tuple[int, int], tuple[list[int], int]] = {}

    def __iter__(self) -> Iterator[Request]:
        tie, number = itertools.count(), itertools.count()
        seconds = sum(1.0 + kind.later_turns for kind in self._kinds) / len(self._kinds) / self._rate
        due: list[tuple[int, int, _Session | int | None]] = [(0, next(tie), None)]
        for which, kind in enumerate(self._kinds):
            under_way = kind.later_turns * kind.pause / (seconds * len(self._kinds))
            for _ in range(min(round(under_way), FIRST_SESSIONS_MAX // len(self._kinds))):
                due.append((self._wait(kind.pause), next(tie), which))
        heapq.heapify(due)
        while True:
            at, _, session = heapq.heappop(due)
            if session is None:
                heapq.heappush(due, (at + self._wait(seconds), next(tie), None))
                session = self._new_session(int(self._dice.random() * len(self._kinds)))
            elif isinstance(session, int):
                session = self._new_session(session)
            yield self._turn(next(number), session, int(at / self._pace) / 1e6)
            if session.turns and session.tokens < INPUT_TOKENS_MAX:
                heapq.heappush(due, (at + self._wait(session.kind.pause), next(tie), session))

    def _new_session(self, which: int) -> _Session:
        kind = self._kinds[which]
        # The square makes the first ones popular.
        name = (which, int(self._dice.random() ** 2 * kind.shared))
        if name not in self._beginnings:
            tokens = self._length(kind.beginning)
            self._beginnings[name] = ([next(self._ids) for _ in range(tokens // self._block_tokens)], tokens)
        blocks, tokens = self._beginnings[name]
        return _Session(kind, list(blocks), tokens, 1 + self._wait(kind.turns - 1) // 1_000_000)

    def _turn(self, number: int, session: _Session, at: float) -> Request:
        session.turns -= 1
        session.tokens += self._length(session.kind.question)
        while len(session.blocks) < session.tokens // self._block_tokens:
            session.blocks.append(next(self._ids))
        answer = self._length(session.kind.answer)
        request = Request(number, at, session.tokens, answer, tuple(session.blocks), self._block_tokens)
        session.tokens += answer
        return request

    def _wait(self, mean: float) -> int:
        """Microseconds until the next one of a Poisson process with this mean, in seconds."""
        return int(-math.log(1.0 - self._dice.random()) * mean * 1e6)

    def _length(self, typical: float) -> int:
        """A number of tokens: log-normal, so that most are short and a few are long."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self._dice.random()))
        tokens = int(typical * math.exp(0.6 * radius * math.cos(math.tau * self._dice.random())))
        return max(1, min(tokens, INPUT_TOKENS_MAX))


@dataclass(slots=True)
class TraceRequests:
    """The requests of a trace, read line by line, from the time of its first one on. `pace` 2: twice as fast
    as they came."""

    file: TraceFile
    pace: float = 1.0
    tokens: int = 0
    """Of the prompts that were read and have blocks."""

    def __iter__(self) -> Iterator[Request]:
        first = None
        for number, line in enumerate(self.file):
            # Some recorders write the time of day.
            first = line.timestamp_ms if first is None else first
            at = int(max(0.0, line.timestamp_ms - first) * 1000 / self.pace) / 1e6
            tokens = max(1, line.input_length)
            self.tokens += line.input_length if line.hash_ids else 0
            yield Request(number, at, tokens, line.output_length, line.hash_ids, line.block_tokens)


@dataclass(frozen=True, slots=True)
class Demand:
    """What the first requests of a workload ask for: the measure of how fast they may come. `seconds`: in
    which they came, with one more gap behind the last of them."""

    requests: int
    work: float
    """Seconds of one GPU that all of it would take, computed."""
    seconds: float

    def load(self, plan: PodPlan) -> float | None:
        """The part of the GPUs' time that all of it would take, computed; None where all come at once."""
        return self.work / (plan.gpus * self.seconds) if self.seconds else None


@dataclass(slots=True)
class Measured:
    """Requests on their way, and what they ask for so far."""

    requests: Iterable[Request]
    plan: PodPlan
    count: int = 0
    work: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0

    def __iter__(self) -> Iterator[Request]:
        for request in self.requests:
            self.first_at = self.first_at if self.count else request.at
            self.last_at = request.at
            self.count += 1
            self.work += self.plan.prefill_seconds(request.input_tokens)
            self.work += request.output_tokens / self.plan.decode_rate
            yield request

    def demand(self) -> Demand:
        seconds = (self.last_at - self.first_at) * self.count / max(1, self.count - 1)
        return Demand(self.count, self.work, seconds)


def demand_of(requests: Iterable[Request], look_at: int, plan: PodPlan) -> Demand:
    """Of the first `look_at` requests."""
    measured = Measured(itertools.islice(requests, look_at), plan)
    for _ in measured:
        pass
    return measured.demand()


def trace_requests(path: Path, requests_max: int, pace: float) -> TraceRequests:
    """The requests of a trace. Raises UserError where it cannot be read."""
    return TraceRequests(TraceFile(path, requests_max=requests_max, fitting=True), pace)
