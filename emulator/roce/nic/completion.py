"""Completion queues (IBTA 11.2.8): a bounded row of work completions, and the one-shot notification.

Nothing here waits for a completion: a poll finds entries or none, and an armed queue calls back once.
"""

import errno
import threading
from collections import deque
from collections.abc import Callable

from emulator.roce.nic.verbs import VerbsError, WcStatus, WorkCompletion


class CompletionQueue:
    """At most `entries` completions wait here; one more is an overrun, which ends the queue (IBTA 10.8.1).

    `on_completion` is called once for each `arm`, with the queue (the completion channel's event);
    `on_entry` at each new entry; `on_overrun` is the device's.
    """

    def __init__(self, entries: int, most: int, on_overrun: "Callable[[CompletionQueue], None]") -> None:
        self.entries = entries
        self._most = most
        self.users = 0
        self.failed = False
        self.on_completion: Callable[[CompletionQueue], None] | None = None
        self.on_entry: Callable[[], None] | None = None
        self._on_overrun = on_overrun
        self._row: deque[WorkCompletion] = deque()
        self._taking = threading.Lock()
        self._armed = False
        self._armed_for_all = False

    def __len__(self) -> int:
        return len(self._row)

    def poll(self, count: int = 1) -> list[WorkCompletion]:
        """Take up to `count` completions, oldest first (ibv_poll_cq). The one method that may be called
        without the device's lock: a program that polls need not wait for a device at work."""
        with self._taking:
            row = self._row
            return [row.popleft() for _ in range(min(count, len(row)))]

    def forget(self, qp_num: int) -> None:
        """Take out the completions of a queue pair that is reset, as the drivers of libibverbs do."""
        with self._taking:
            if any(completion.qp_num == qp_num for completion in self._row):
                self._row = deque(completion for completion in self._row if completion.qp_num != qp_num)

    def arm(self, solicited_only: bool = False) -> None:
        """Call `on_completion` at the next entry (ibv_req_notify_cq), or at the next that was solicited or is
        an error. Entries that are there already do not count; to arm for all outweighs the other."""
        self._armed = True
        self._armed_for_all = self._armed_for_all or not solicited_only

    def resize(self, entries: int) -> None:
        """ibv_resize_cq. EINVAL where it would not hold what is in it, or is more than the device allows."""
        if not max(1, len(self._row)) <= entries <= self._most:
            raise VerbsError(errno.EINVAL, f"a completion queue of {entries} entries is not possible")
        self.entries = entries

    def push(self, completion: WorkCompletion, solicited: bool = False) -> None:
        if self.failed:
            return
        if len(self._row) >= self.entries:
            self.failed = True
            self._on_overrun(self)
            return
        self._row.append(completion)
        if self.on_entry is not None:
            self.on_entry()
        if self._armed and (self._armed_for_all or solicited or completion.status is not WcStatus.SUCCESS):
            self._armed = self._armed_for_all = False
            if self.on_completion is not None:
                self.on_completion(self)
