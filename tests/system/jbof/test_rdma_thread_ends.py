"""An enclosure whose RDMA thread has ended is of no use: it ends as a process, and is started again."""

from __future__ import annotations

import signal
from pathlib import Path

from nvmeof.transport.verbs_provider import free_loopback_address
from tests.support.processes import Processes
from tests.support.waiting import wait_until

BREAKABLE = """
import os, signal, socket
from emulator.jbof.cli import main

def break_it(*_):
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(number)) as found:
                is_port = found.family == socket.AF_INET and found.getsockname()[1] == 4791
        except OSError:
            continue
        if is_port:
            os.dup2(nothing, number)

signal.signal(signal.SIGUSR1, break_it)
main()
"""
"""At SIGUSR1 the socket of the emulated NIC is none any more."""


def test_an_enclosure_whose_rdma_thread_ends_ends_as_a_process(tmp_path: Path, processes: Processes) -> None:
    address = free_loopback_address()
    words = ["--transport", "rdma", "--address", address, "--port", "4420", "--drive-size", "16M"]
    started = processes.python("-c", BREAKABLE, *words)
    started.wait_for_line("ready ")
    started.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: not started.running, 30, "the end of the enclosure")
    assert started.process.returncode == 1
    assert "the RDMA thread of the enclosure ends" in started.output
    last = started.output.splitlines()[-1]
    assert last.startswith(f"error: nobody is served at {address}:4420 any more: ")
    assert "Socket operation on non-socket" in last
