"""Work that a worker does after its reply, so that the program goes on meanwhile.

A face hands such work over while it serves a request (`AfterReply.put_off`). The worker that serves the
request does the work in its own thread, with its own channel, once the kernel has the reply
(`WorkAfterReply.run`). So the work needs no thread more, and no hand-over from one to another.

A worker that joins keeps the payload of its request until then: the work may be done out of it.

Where the thread is of no such door, or too many workers are at it already, the face hears False and does the
work before the reply.

An early reply gains something where another worker is free for what the program asks next
(`AfterReply.has_free_worker`). Where all are busy, that request waits for a worker anyway. Then a close that
finds work of its file under way would keep a second worker from serving.
"""

import threading
from typing import Final, Protocol

from agent.host_os.per_user_bounds import ALL, Bounds, Limit
from agent.pool.steps import Runner, Steps

STORED_LATER: Final = Limit(
    "stored-later", "blocks and chunks of files that are stored after the answer to their writer", 32,
    by="everybody", share=ALL, refused="stored before the answer", bytes_each=0,
)  # fmt: skip
WORKERS_EACH: Final = 2
"""One worker in so many may be busy after its reply; the others serve requests. Of two workers both may be: a
program that writes a file on holds both either way, the second by a block that it would wait for."""


class Work(Protocol):
    """What may be put off. Nothing escapes its steps but faults of the program."""

    def steps(self) -> Steps[None]:
        """Do it."""

    def end(self) -> None:
        """It was done, or never will be: those who wait for it go on. A second call changes nothing."""


class WorkAfterReply:
    """What one worker has put off. For that worker's thread alone."""

    def __init__(self, owner: "AfterReply") -> None:
        self._owner: Final = owner
        self.due: list[Work] = []
        self.is_free = True
        """The worker waits for a request. Its own thread says so."""

    def run(self, runner: Runner) -> None:
        """Do all that is due. Raises what the first of it raises; the rest is dropped then."""
        try:
            for work in self.due:
                runner.run(work.steps())
        finally:
            self._drop()

    def leave(self) -> None:
        """The worker serves no longer. What is due is dropped."""
        self._owner.left(self)
        self._drop()

    def _drop(self) -> None:
        due, self.due = self.due, []
        for work in due:
            work.end()
        self._owner.ended(len(due))


def after_reply_of(workers: int, bounds: Bounds) -> "AfterReply":
    """The `AfterReply` for doors that have `workers` workers in all."""
    most = workers if workers <= WORKERS_EACH else workers // WORKERS_EACH
    after = AfterReply(min(STORED_LATER.most, most))
    bounds.watch(STORED_LATER, lambda: {"all": after.under_way}, lambda: after.refusals, most=after.most)
    return after


class AfterReply:
    """The workers of all doors that do work after their replies. Safe from any thread."""

    def __init__(self, most: int) -> None:
        """`most`: pieces of work that are put off and have not ended, of all workers."""
        self.most: Final = most
        self.under_way = 0
        self.refusals = 0
        """How often work was done before the reply, because so much was under way."""
        self._lock = threading.Lock()
        self._workers: dict[int, WorkAfterReply] = {}

    def join(self) -> WorkAfterReply:
        """This thread runs, after each reply, what was put off in it; it calls `leave` at its end."""
        worker = WorkAfterReply(self)
        with self._lock:
            self._workers[threading.get_ident()] = worker
        return worker

    def has_room(self) -> bool:
        """Whether this thread may put work off, as it looks just now."""
        return self.under_way < self.most and threading.get_ident() in self._workers

    def has_free_worker(self) -> bool:
        """Whether a worker waits for a request, as it looks just now."""
        return any(worker.is_free for worker in list(self._workers.values()))

    def put_off(self, work: Work) -> bool:
        """Whether this thread does the work after its reply."""
        with self._lock:
            worker = self._workers.get(threading.get_ident())
            if worker is None:
                return False
            if self.under_way >= self.most:
                self.refusals += 1
                return False
            self.under_way += 1
            worker.due.append(work)
            return True

    def left(self, worker: WorkAfterReply) -> None:
        with self._lock:
            for thread, each in list(self._workers.items()):
                if each is worker:
                    del self._workers[thread]

    def ended(self, count: int) -> None:
        with self._lock:
            self.under_way -= count
