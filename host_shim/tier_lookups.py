"""Answers to "is this block there?" for a scheduler that asks key by key and never waits.

A scheduler asks for keys one by one, and again with each step. The first question makes a verdict; `flush`,
at the end of a step, sends all new keys as one batch to a thread, which asks the pool in one round trip. A
verdict lives as long as a request that asked for it, and a request is told one thing. "Yes" goes for all
requests meanwhile; after "no" the next request has the pool asked again. Everything doubtful is "no": no
agent, no answer within the deadline, no room for more questions. While an answer is overdue no further
question is taken, so a pool that hangs delays one step's requests alone.

All methods belong to the thread (or the lock) that the engine calls its connector under. The runner's thread
writes nothing but `found` of the verdicts it was given, under `_deciding`.
"""

import threading
import time
from collections.abc import Callable, Sequence

from host_shim.connector_jobs import JobRunner
from host_shim.control_wire import Outcome

VERDICTS_MAX = 65_536
"""Keys under question by unfinished requests; 65,536 blocks of 16 tokens are a million tokens."""
BATCHES_MAX = 64


class _Verdict:
    """On one key. `found` is None until the pool has answered, `until` the time it is waited for.

    `found` never leaves False, so that of several verdicts on a key only the latest can be anything else.
    """

    __slots__ = ("askers", "cause", "found", "until")

    def __init__(self) -> None:
        self.found: bool | None = None
        self.cause: Outcome | None = None
        """Why it is not there, where the pool said so."""
        self.until: float | None = None
        self.askers = 0


class TierLookups:
    """Verdicts on keys. `ask` is called on a thread with a batch of keys and may wait for the pool."""

    def __init__(
        self,
        name: str,
        ask: Callable[[Sequence[bytes]], Sequence[bool | Outcome | None]],
        deadline: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._deadline = deadline
        self._clock = clock
        self._runner = JobRunner(name, threads=1, waiting_max=BATCHES_MAX)
        self._latest: dict[bytes, _Verdict] = {}
        self._told: dict[str, dict[bytes, _Verdict]] = {}
        self._alive = 0
        self._deciding = threading.Lock()
        self._new: list[tuple[bytes, _Verdict]] = []
        self._overdue = False

    def verdict(self, key: bytes, request_id: str) -> bool | None:
        """Whether the pool has `key`; None: ask again with the next step."""
        one = self._told.get(request_id, {}).get(key)
        if one is None:
            one = self._latest.get(key)
            if one is None or one.found is False:
                if self._overdue or self._alive >= VERDICTS_MAX:
                    return False
                one = self._latest[key] = _Verdict()
                self._alive += 1
                self._new.append((key, one))
            one.askers += 1
            self._told.setdefault(request_id, {})[key] = one
        if one.found is None and one.until is not None and self._clock() > one.until:
            with self._deciding:
                late = one.found is None
                one.found = bool(one.found)
                one.cause = Outcome.LATE if late else one.cause
            if late:
                self._overdue = True
        return one.found

    def flush(self) -> None:
        """Send the questions that came since the last call."""
        new, self._new = self._new, []
        asked = [(key, one) for key, one in new if one.askers]
        if not asked:
            return
        until = self._clock() + self._deadline
        for _key, one in asked:
            one.until = until
        if not self._runner.submit(lambda: self._answer(asked), urgent=True):
            for _key, one in asked:
                one.found = False

    def mark_missing(self, keys: Sequence[bytes]) -> None:
        """A load of these failed: further requests are told no, or it would be tried for ever."""
        for key in keys:
            one = self._latest.get(key)
            if one is not None:
                with self._deciding:
                    one.found = False

    def answers(self, request_id: str) -> list[Outcome | None]:
        """What a request was told of each key that it asked for, in the order in which it asked."""
        return [
            Outcome.HIT if one.found else one.cause
            for one in self._told.get(request_id, {}).values()
            if one.found is not None
        ]

    def forget_request(self, request_id: str) -> None:
        """A request is over; verdicts that no other request asked for are dropped."""
        for key, one in self._told.pop(request_id, {}).items():
            one.askers -= 1
            if not one.askers:
                self._alive -= 1
                if self._latest.get(key) is one:
                    del self._latest[key]

    def close(self, seconds: float = 1.0) -> None:
        """Take no further questions; the thread ends, or is left to its fate after `seconds`."""
        self._overdue = True
        self._runner.close(seconds)

    def _answer(self, asked: Sequence[tuple[bytes, _Verdict]]) -> None:
        answers: Sequence[bool | Outcome | None] = ()
        try:
            answers = self._ask([key for key, _one in asked])
        finally:
            for index, (_key, one) in enumerate(asked):
                with self._deciding:
                    if one.found is None:
                        answer = answers[index] if index < len(answers) else None
                        one.found = answer is True or answer is Outcome.HIT
                        one.cause = answer if isinstance(answer, Outcome) and not one.found else None
            self._overdue = False
