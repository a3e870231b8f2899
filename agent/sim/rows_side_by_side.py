"""The rows of an experiment in processes of their own, as many at a time as there are processors.

A row is a whole run by itself, so its outcome is the same as one after the other. Processes are forked: they
have the requests' source and the modules as they are here.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any, NamedTuple

from agent.errors import UserError
from agent.sim.experiment import Experiment, PlayedRow, Report, Source, play, play_row

LOOK_SECONDS = 0.1
"""Between two looks at what the rows say of their progress."""


class _Work(NamedTuple):
    """What a process has from its parent."""

    experiment: Experiment
    source: Source
    heard: "SimpleQueue[tuple[str, int]]"


_work: _Work | None = None


def play_side_by_side(experiment: Experiment, say: Callable[[str, int], None]) -> Report:
    """As `play`, with the rows side by side where there are several and more than one processor."""
    processes = min(len(experiment.rows), len(os.sched_getaffinity(0)))
    if processes < 2:
        return play(experiment, say)
    context = multiprocessing.get_context("fork")
    heard: SimpleQueue[tuple[str, int]] = context.SimpleQueue()
    report = Report(experiment)
    # Leaving the block ends what runs, also at Ctrl-C.
    with context.Pool(processes, _begin, (experiment, experiment.source(), heard)) as pool:
        running = [pool.apply_async(_play_here, (name,)) for name in experiment.rows]
        while not all(each.ready() for each in running):
            while not heard.empty():
                say(*heard.get())
            time.sleep(LOOK_SECONDS)
        played = [each.get() for each in running]
    memory = []
    for row in played:
        if isinstance(row, tuple):
            raise UserError(*row)
        report.add(row)
        memory.append(row.memory_bytes)
    report.memory_bytes = sum(sorted(memory)[-processes:])
    return report


def _begin(experiment: Experiment, source: Source, heard: Any) -> None:
    global _work
    _work = _Work(experiment, source, heard)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends its children


def _play_here(name: str) -> PlayedRow | tuple[str, str]:
    """Play a row; message and advice of a UserError, which would not come through whole."""
    assert _work is not None
    heard = _work.heard
    try:
        return play_row(_work.experiment, _work.source, name, lambda served: heard.put((name, served)))
    except UserError as wrong:
        return str(wrong), wrong.advice
