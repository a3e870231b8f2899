"""Blocks between an engine's host memory and the pool, in jobs with deadlines, beside the engine's scheduler.

A job moves some chunks of equal size in the engine's memory, which the engine reserves until the job is over:

* no call waits for the pool, but `drain`, and that no longer than the deadlines;
* once a job was reported, nothing of it touches the engine's memory, though a hanging mount may still hold
  its thread. So blocks go through buffers of our own, and the copy (10 GiB/s and more, without the
  interpreter's lock) is made under the job's lock, only while the job is open;
* a load counts as done for exactly the blocks that were proved and copied whole;
* a store that failed leaves nothing behind that a load could take for the block.

Memory: `threads` x `PIECE_BLOCKS` blocks, kept from job to job.
"""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from host_shim.connector_jobs import JobRunner
from host_shim.named_values import NamedValues
from host_shim.unlocked_memory import copy_bytes, new_memory

PIECE_BLOCKS = 4
"""Blocks that a thread moves at a time: one round trip for the names, then that many values."""


@dataclass(slots=True, eq=False)
class Job:
    """One job. `lock` guards all that follows it; the engine's memory is touched only with it held."""

    job_id: int
    is_load: bool
    keys: tuple[bytes, ...]
    chunks: Sequence[int]
    started: float = 0.0
    until: float = 0.0
    seconds: float = 0.0
    """Its duration, once it was reported."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    open: bool = True
    left: int = 0
    done: tuple[bytes, ...] = ()
    """The keys that were stored or loaded, whole."""
    gone: tuple[bytes, ...] = ()
    """Keys of a load that the pool has not."""

    @property
    def success(self) -> bool:
        return len(self.done) == len(self.keys)


class TierJobs:
    """Stores and loads of the chunks of `primary`, which is flat, writable and `chunk_bytes` a chunk.

    `name_of_key` makes the pool's name of an engine's key. All methods belong to the thread (or the lock)
    that the engine calls its connector under.
    """

    def __init__(
        self,
        values: NamedValues,
        primary: memoryview,
        chunk_bytes: int,
        name_of_key: Callable[[bytes], bytes],
        *,
        threads: int = 4,
        load_deadline: float = 5.0,
        store_deadline: float = 30.0,
        new_room: Callable[[int], memoryview] = new_memory,
        find_gone: Callable[[Sequence[bytes]], list[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`new_room`: where the threads' own buffers are taken from. `find_gone`: which of some keys the pool
        has not; asked on a thread for those that a load did not bring."""
        if chunk_bytes < 1:
            raise ValueError("a chunk has at least one byte")
        self._values = values
        self._primary = primary
        self._chunk_bytes = chunk_bytes
        self._name_of_key = name_of_key
        self._load_deadline = load_deadline
        self._store_deadline = store_deadline
        self._new_room = new_room
        self._find_gone = find_gone
        self._clock = clock
        self._runner = JobRunner("g35-tier", threads)
        self._own = threading.local()
        self._jobs: dict[int, Job] = {}
        self._piece_done = threading.Condition()

    def store(self, job_id: int, keys: Sequence[bytes], chunks: Sequence[int]) -> None:
        """Store chunk `chunks[i]` under `keys[i]`; see `finished`."""
        self._begin(Job(job_id, False, tuple(keys), chunks), self._store_deadline, self._store_piece)

    def load(self, job_id: int, keys: Sequence[bytes], chunks: Sequence[int]) -> None:
        """Load `keys[i]` into chunk `chunks[i]`; see `finished`."""
        self._begin(Job(job_id, True, tuple(keys), chunks), self._load_deadline, self._load_piece)

    def finished(self) -> list[Job]:
        """Jobs that ended since the last call, each once; those past their deadline end here, failed."""
        now = self._clock()
        return [self._report(job, now) for job in list(self._jobs.values()) if self._over(job, now)]

    def drain(self) -> None:
        """Wait until every job is over, by itself or by its deadline; `finished` reports them."""
        while True:
            with self._piece_done:
                waiting = [job for job in self._jobs.values() if job.left]
                if not waiting:
                    return
                soonest = min(job.until for job in waiting) - self._clock()
                if soonest > 0:
                    self._piece_done.wait(soonest)
                    continue
            for job in waiting:
                if job.until <= self._clock():
                    self._shut(job)

    def close(self, seconds: float = 2.0) -> None:
        """End all jobs now; the engine's memory is not touched any more when this returns."""
        for job in self._jobs.values():
            self._shut(job)
        self._runner.close(seconds)
        self._primary.release()

    def _begin(self, job: Job, deadline: float, work: Callable[[Job, int, int], list[bytes]]) -> None:
        job.started = self._clock()
        job.until = job.started + deadline
        starts = range(0, len(job.keys), PIECE_BLOCKS)
        job.left = len(starts)
        self._jobs[job.job_id] = job
        for start in starts:
            piece = functools.partial(self._piece, job, start, work)
            if not self._runner.submit(piece, urgent=job.is_load):
                self._count(job, [])

    def _piece(self, job: Job, start: int, work: Callable[[Job, int, int], list[bytes]]) -> None:
        done: list[bytes] = []
        try:
            if job.open and self._clock() < job.until:
                done = work(job, start, min(start + PIECE_BLOCKS, len(job.keys)))
        finally:
            self._count(job, done)

    def _count(self, job: Job, done: list[bytes]) -> None:
        with job.lock:
            if job.open:
                job.done += tuple(done)
        with self._piece_done:
            job.left = max(0, job.left - 1)
            self._piece_done.notify_all()

    def _store_piece(self, job: Job, start: int, end: int) -> list[bytes]:
        keys = job.keys[start:end]
        there = self._values.exists([self._name_of_key(key) for key in keys])
        missing = [index for index, known in enumerate(there) if not known]
        stored = [key for key, known in zip(keys, there, strict=True) if known]
        if not missing:
            return stored
        buffers = self._buffers()
        with job.lock:
            if not job.open:
                return []
            for buffer, index in zip(buffers, missing, strict=False):
                copy_bytes(buffer, self._chunk(job.chunks[start + index]))
        names = [self._name_of_key(keys[index]) for index in missing]
        now_there = self._values.store(names, [[buffer] for buffer in buffers[: len(missing)]])
        return stored + [keys[index] for index, good in zip(missing, now_there, strict=True) if good]

    def _load_piece(self, job: Job, start: int, end: int) -> list[bytes]:
        keys = job.keys[start:end]
        buffers = self._buffers()[: len(keys)]
        lengths = self._values.load([self._name_of_key(key) for key in keys], [[each] for each in buffers])
        loaded = []
        with job.lock:
            if not job.open:
                return []
            for index, length in enumerate(lengths):
                if length == self._chunk_bytes:
                    copy_bytes(self._chunk(job.chunks[start + index]), buffers[index])
                    loaded.append(keys[index])
        if len(loaded) < len(keys) and self._find_gone is not None:
            there = set(loaded)
            gone = self._find_gone([key for key in keys if key not in there])
            with job.lock:
                job.gone += tuple(gone)
        return loaded

    def _chunk(self, number: int) -> memoryview:
        begin = int(number) * self._chunk_bytes
        if begin < 0 or begin + self._chunk_bytes > len(self._primary):
            raise ValueError(f"chunk {number} is not in the engine's memory of {len(self._primary)} bytes")
        return self._primary[begin : begin + self._chunk_bytes]

    def _buffers(self) -> list[memoryview]:
        """This thread's own."""
        found: list[memoryview] | None = getattr(self._own, "buffers", None)
        if found is None:
            size = self._chunk_bytes
            room = self._new_room(size * PIECE_BLOCKS)
            found = [room[at : at + size] for at in range(0, len(room), size)]
            self._own.buffers = found
        return found

    def _over(self, job: Job, now: float) -> bool:
        if not job.left:
            return True
        if now <= job.until or not job.lock.acquire(blocking=False):
            return False  # a copy is under way, a matter of a millisecond: the next call will see
        job.open = False
        job.lock.release()
        return True

    def _shut(self, job: Job) -> None:
        with job.lock:
            job.open = False
        with self._piece_done:
            job.left = 0

    def _report(self, job: Job, now: float) -> Job:
        job.seconds = max(0.0, now - job.started)
        return self._jobs.pop(job.job_id)
