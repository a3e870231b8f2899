"""A state folder is one agent's: the second hears whose it is, and a dead one keeps nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from agent.attach.state_lock import LOCK_FILE, state_of_one_agent
from agent.errors import G35Error

HOLDER = """
import os, sys, trio
from pathlib import Path
from agent.attach.state_lock import state_of_one_agent

async def hold():
    async with state_of_one_agent(Path(sys.argv[1])):
        if reader := os.fork():  # as an agent of several processes does
            print("held", reader, flush=True)
        await trio.sleep_forever()

trio.run(hold)
"""


def take(state: Path) -> None:
    async def enter() -> None:
        async with state_of_one_agent(state):
            pass

    trio.run(enter, clock=MockClock(autojump_threshold=0))


def test_a_second_agent_waits_for_the_death_of_the_first_and_not_of_its_readers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        reader = int(holder.stdout.readline().removeprefix("held "))
        try:
            with pytest.raises(G35Error) as told:
                take(tmp_path)
            assert str(told.value) == f"another agent, process {holder.pid}, uses the state folder {tmp_path}"
            assert "agent.state" in told.value.advice
            holder.kill()
            holder.wait()
            take(tmp_path)
        finally:
            holder.kill()
            os.kill(reader, 9)


def test_a_folder_that_was_left_is_free(tmp_path: Path) -> None:
    take(tmp_path)
    take(tmp_path)
    assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"
