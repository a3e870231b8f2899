"""`g35 down`: end what `g35 up` started, whatever state it is in."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from agent.cli.up.layout import Layout, default_state, is_alive
from agent.errors import G35Error
from agent.fs.mounting import clear_dead_mount

SECONDS = 45.0


def down(
    state: Annotated[Path | None, typer.Option(help="The state folder that was given to g35 up.")] = None,
) -> None:
    """Unmount and end the pool that `g35 up` brought up. What is on its drives stays."""
    layout = Layout((state or default_state()).absolute())
    if not layout.state.is_dir():
        raise G35Error(f"there is no state folder {layout.state}", "name the one that g35 up was given")
    running = layout.running()
    if running is None:
        leftover = layout.running_file.exists()
        _clear(layout)
        print("nothing was up" + ("; cleared away what a killed g35 up had left" if leftover else ""))
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.pid, signal.SIGTERM)
    end = time.monotonic() + SECONDS
    while is_alive(running.pid):
        if time.monotonic() > end:
            raise G35Error(f"process {running.pid} does not end", f"look at {layout.log}, or kill it")
        time.sleep(0.05)
    _clear(layout)
    print("down")


def _clear(layout: Layout) -> None:
    with contextlib.suppress(OSError, ValueError):
        clear_dead_mount(layout.default_mount())
    layout.running_file.unlink(missing_ok=True)
