"""`g35 down`: end what `g35 up` started, whatever state it is in."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from agent.cli.up.folder_trouble import told_of_owner
from agent.cli.up.layout import Layout, default_state, is_alive
from agent.errors import G35Error
from agent.fs.doors.mounting import clear_dead_mount

DOWN_SECONDS = 45.0
CHILDREN_SECONDS = 5.0


def down(
    state: Annotated[
        Path | None,
        typer.Option(readable=False, help="The state folder that g35 up was given; the same default."),
    ] = None,
) -> None:
    """Unmount and end the pool that `g35 up` started. The data on its drives stay."""
    layout = Layout((state or default_state()).absolute())
    with told_of_owner(layout.state):
        if not layout.state.is_dir():
            raise G35Error(f"there is no state folder {layout.state}", "name the one that g35 up was given")
        lock, was_up = _end_who_holds_it(layout)
    try:
        cleared = _clear(layout)
    finally:
        os.close(lock)
    if was_up:
        print("down")
    else:
        print("nothing was up" + ("; cleared away what a killed g35 up had left" if cleared else ""))


def _end_who_holds_it(layout: Layout) -> tuple[int, bool]:
    """The folder's lock, once its holder has ended; and whether there was one.

    A `g35 up --detach` hands its lock to the process that stays, so the holder may change meanwhile: each
    that signs it is asked once. The lock, and not up.json, is what counts: it is held while things come up
    and go down, and by nobody after a kill.
    """
    asked: set[int] = set()
    end = time.monotonic() + DOWN_SECONDS
    was_held = False
    while (lock := layout.try_lock()) is None:
        was_held = True
        holder = layout.lock_holder()
        if holder is not None and holder not in asked:
            asked.add(holder)
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder, signal.SIGTERM)
        if time.monotonic() > end:
            raise G35Error(f"process {holder} does not end", f"look at {layout.log}, or kill it")
        time.sleep(0.05)
    return lock, was_held


def _clear(layout: Layout) -> bool:
    """Clear away what a killed `g35 up` leaves; whether there was anything."""
    _wait_for_children(layout)
    dead = layout.mounts_left()
    for mount in dead:
        clear_dead_mount(mount)
    return layout.remove_leftovers() or bool(dead)


def _wait_for_children(layout: Layout) -> None:
    """The kernel kills them with their parent, which takes a moment; the mount is dead only after that."""
    end = time.monotonic() + CHILDREN_SECONDS
    for file in layout.state.glob("*.pid"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(file.read_text())
            while is_alive(pid) and time.monotonic() < end:
                time.sleep(0.02)
