"""The rows of an experiment in processes of their own, as many at a time as there are processors.

A row is a whole run by itself, so its outcome is the same as one after the other. Processes are forked: they
have the requests' source and the modules as they are here. None outlives its parent, however that ends.
"""

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Final

from agent.errors import G35Error, UserError
from agent.host_os.parent_death import die_with_parent
from agent.sim.experiment import Experiment, PlayedRow, Report, Source, play, play_row

LOOK_SECONDS: Final = 0.1
"""Between two looks at what the rows say, so that the display goes on."""
KILLED: Final = "see that the machine has the memory, or play fewer rows at a time (--rows)"
"""What ends a process from outside is nearly always Linux, where memory ran out."""


def play_side_by_side(experiment: Experiment, say: Callable[[str, int], None]) -> Report:
    """As `play`, with the rows side by side where there are several and more than one processor."""
    processes = min(len(experiment.rows), len(os.sched_getaffinity(0)))
    if processes < 2:
        return play(experiment, say)
    rows = _Rows(experiment, experiment.source())
    report, memory = Report(experiment), []
    try:
        played = rows.play(processes, say)
    finally:
        rows.end()
    for row in played:
        report.add(row)
        memory.append(row.memory_bytes)
    report.memory_bytes = sum(sorted(memory)[-processes:])
    return report


class _Rows:
    """The rows that are being played, and the outcomes of those that were."""

    def __init__(self, experiment: Experiment, source: Source) -> None:
        self._experiment = experiment
        self._source = source
        self._running: dict[Connection, tuple[int, BaseProcess]] = {}
        self._played: dict[int, PlayedRow] = {}

    def play(self, processes: int, say: Callable[[str, int], None]) -> list[PlayedRow]:
        """The outcomes of all rows, in their order. Raises what a row raised, and G35Error for one that was
        killed."""
        left = deque(range(len(self._experiment.rows)))
        while left or self._running:
            while left and len(self._running) < processes:
                self._begin(left.popleft())
            for heard in wait(list(self._running), LOOK_SECONDS):
                assert isinstance(heard, Connection)
                self._hear(heard, say)
        return [self._played[number] for number in range(len(self._experiment.rows))]

    def _begin(self, number: int) -> None:
        context = multiprocessing.get_context("fork")
        hears, says = context.Pipe(duplex=False)
        name = self._experiment.rows[number]
        process = context.Process(target=_play_here, args=(self._experiment, self._source, name, says))
        process.start()
        # Ours is closed, so that the end of the process is the end of what is heard.
        says.close()
        self._running[hears] = number, process

    def _hear(self, heard: Connection, say: Callable[[str, int], None]) -> None:
        number, process = self._running[heard]
        name = self._experiment.rows[number]
        try:
            told = heard.recv()
        except EOFError:
            process.join()
            raise G35Error(f"the row {name} was ended from outside: {_end_of(process)}", KILLED) from None
        if isinstance(told, int):
            say(name, told)
            return
        if not isinstance(told, PlayedRow):
            raise told
        self._played[number] = told
        process.join()
        self._forget(heard)

    def _forget(self, heard: Connection) -> None:
        _number, process = self._running.pop(heard)
        heard.close()
        process.close()

    def end(self) -> None:
        """End what still runs."""
        for _number, process in self._running.values():
            process.kill()
        for heard, (_number, process) in list(self._running.items()):
            process.join()
            self._forget(heard)


def _end_of(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _play_here(experiment: Experiment, source: Source, name: str, says: Connection) -> None:
    """Play a row, and say how it goes: whole numbers of requests, then the outcome or what was raised."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends its children
    for ending in (signal.SIGTERM, signal.SIGHUP):  # the parent's way to hear these is not ours
        signal.signal(ending, signal.SIG_DFL)
    try:
        told: PlayedRow | Exception = play_row(experiment, source, name, says.send)
    except UserError as wrong:
        told = UserError(wrong.message, wrong.advice)
    except Exception as bug:  # the parent tells it as it tells its own
        bug.add_note(traceback.format_exc())
        told = bug
    says.send(told)
    # No more: a thread of the parent's display may have held the lock of a stream when we were forked.
    os._exit(0)
