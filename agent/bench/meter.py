"""What the processes at work use of the processors in the timed parts of a measurement."""

import os
from collections.abc import Mapping

from agent.bench.processor_time import Usage, process_seconds, thread_times, used

CLIENT = "client"
"""The bench itself, whose threads ask: in a measurement nothing else of it works."""


class ProcessMeter:
    """Processor time, in seconds, of each process; `processes` are their numbers by name."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._processes = {CLIENT: os.getpid(), **processes}
        self._began: dict[str, float] = {}
        self.spent = dict.fromkeys(self._processes, 0.0)

    def begin(self) -> None:
        self._began = self._seen()

    def end(self) -> None:
        for name, seconds in self._seen().items():
            self.spent[name] += seconds - self._began[name]

    def _seen(self) -> dict[str, float]:
        return {name: process_seconds(pid) for name, pid in self._processes.items()}


class ThreadMeter:
    """The usage of each process by kinds of threads. It looks at files of /proc, a few for each thread."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._processes = {CLIENT: os.getpid(), **processes}
        self.parts = 0
        """Timed parts that it was told of."""
        self.usage: dict[str, dict[str, Usage]] = {name: {} for name in self._processes}

    def begin(self) -> None:
        self._began = {name: thread_times(pid) for name, pid in self._processes.items()}

    def end(self) -> None:
        self.parts += 1
        for name, pid in self._processes.items():
            kinds = self.usage[name]
            for kind, usage in used(self._began[name], thread_times(pid)).items():
                kinds[kind] = kinds.get(kind, Usage()).plus(usage)
