"""Emulated devices in two processes: data, a clean end, a peer that is killed, and what Wireshark says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulator.roce.cm.connection import Connection
from emulator.roce.cm.events import CmEventType
from emulator.roce.cm.limits import CmTimes
from emulator.roce.nic.retry import timeout_seconds
from emulator.roce.nic.verbs import QpState, SendOpcode, WcStatus
from tests.support.halting import halted, stands_still
from tests.support.needs import needs_tshark
from tests.support.processes import Processes, Started
from tests.support.roce.devices import IMPATIENT, PATIENT, Program, some_ip
from tests.support.waiting import wait_until

HERE = Path(__file__).resolve()
ROOT = HERE.parents[3]
PEER = ROOT / "tests/support/roce/peer_program.py"


class Rig:
    """A program here and one in another process, connected."""

    def __init__(
        self,
        processes: Processes,
        own_pcap: Path | None = None,
        pcap: Path | None = None,
        times: CmTimes = PATIENT,
    ) -> None:
        self.ip = some_ip()
        words = [str(PEER), self.ip] + ([str(pcap)] if pcap else [])
        self.peer: Started = processes.python(*words, environment={"PYTHONPATH": str(ROOT)})
        self.peer.wait_for_line("ready")
        self.program = Program(some_ip(), pcap=own_pcap, times=times)
        self.program.request(self.ip)
        self.connection: Connection
        self.connection, self.rkey = self.program.establish()

    def disconnect(self) -> None:
        with self.program.device.turn():
            self.connection.disconnect(self.program.now())
        self.program.event(CmEventType.DISCONNECTED)


@pytest.fixture
def rig(processes: Processes) -> Iterator[Rig]:
    rig = Rig(processes)
    try:
        yield rig
    finally:
        rig.program.close()


@pytest.fixture
def impatient_rig(processes: Processes) -> Iterator[Rig]:
    """One whose program here soon gives up its peer."""
    rig = Rig(processes, times=IMPATIENT)
    try:
        yield rig
    finally:
        rig.program.close()


def _talk(rig: Rig) -> None:
    """A message to and fro, a WRITE and a READ of a whole MiB, of which the bytes are right."""
    program = rig.program
    program.post_receive(0, 4096)
    program.memory[8192:8292] = os.urandom(100)
    program.post(SendOpcode.SEND, 8192, 100, wr_id=1)
    assert {done.status for done in program.done(2)} == {WcStatus.SUCCESS}
    assert program.memory[:100] == program.memory[8192:8292]
    size = len(program.memory) // 2
    program.memory[:size] = os.urandom(size)
    program.post(SendOpcode.RDMA_WRITE, 0, size, rkey=rig.rkey, remote=size)
    program.post(SendOpcode.RDMA_READ, size, size, rkey=rig.rkey, remote=size)
    assert [done.status for done in program.done(2)] == [WcStatus.SUCCESS] * 2
    assert program.memory[:size] == program.memory[size:]


def test_data_and_a_clean_end(rig: Rig) -> None:
    _talk(rig)
    rig.disconnect()
    rig.peer.wait_for_line("disconnected")
    assert rig.peer.process.wait(60) == 0
    assert "failed" not in rig.peer.output


def _retry_time() -> float:
    """After this long without an answer a queue pair has given up, though each time-out was found late."""
    after = timeout_seconds(IMPATIENT.ack_exponent)
    assert after is not None
    return 2 * (1 + 7) * after


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_vanishes_in_the_middle_ends_in_flush_errors(
    impatient_rig: Rig, how: signal.Signals
) -> None:
    rig, program = impatient_rig, impatient_rig.program
    size = len(program.memory)
    for number in range(32):
        opcode = SendOpcode.RDMA_WRITE if number % 2 else SendOpcode.RDMA_READ
        program.post(opcode, 0, size, rkey=rig.rkey, wr_id=number)
    program.post_receive(0, 64, wr_id=99)
    statuses = [done.status for done in program.done(4)]
    os.kill(rig.peer.pid, how)
    wait_until(lambda: stands_still(rig.peer.pid), 30.0, "a peer that does nothing more")
    # On a fast machine all of them may have been answered by now; this one can't be.
    program.post(SendOpcode.RDMA_WRITE, 0, size, rkey=rig.rkey, wr_id=98)
    start = time.monotonic()
    more = program.done(30, seconds=_retry_time() + 10.0)
    took = time.monotonic() - start
    statuses += [done.status for done in more]
    # What was done before; then the one that was not answered; then what came after it. Each exactly once.
    failed = [status for status in statuses if status is not WcStatus.SUCCESS]
    assert failed[0] is WcStatus.RETRY_EXC_ERR
    assert set(failed[1:]) <= {WcStatus.WR_FLUSH_ERR}
    assert sorted(done.wr_id for done in more)[-1] == 99
    assert took < _retry_time() + 5.0
    with program.device.turn():
        assert program.qp.state is QpState.ERR
        assert len(program.cq) == 0


def test_a_peer_without_processor_for_seconds_is_waited_for(impatient_rig: Rig) -> None:
    """Its kernel takes what we send meanwhile; its process answers when it runs again."""
    rig, program = impatient_rig, impatient_rig.program
    with halted(rig.peer.pid):
        program.post_receive(0, 4096)
        program.post(SendOpcode.SEND, 8192, 100, wr_id=1)
        until = time.monotonic() + 2.0
        program.device.drive_until(lambda: len(program.cq), until)
        assert len(program.cq) == 0
    assert {done.status for done in program.done(2)} == {WcStatus.SUCCESS}


def test_a_process_that_ends_tells_its_peers(impatient_rig: Rig) -> None:
    """SIGINT ends it in the midst of everything, without a word of its program; its device says goodbye."""
    rig, program = impatient_rig, impatient_rig.program
    for number in range(16):
        program.post(SendOpcode.RDMA_WRITE, 0, len(program.memory), rkey=rig.rkey, wr_id=number)
    program.done(2)
    os.kill(rig.peer.pid, signal.SIGINT)
    assert program.event(CmEventType.DISCONNECTED).status == 0
    last = program.done(14, seconds=_retry_time() + 20.0)[-1]
    assert last.status in (WcStatus.WR_FLUSH_ERR, WcStatus.RETRY_EXC_ERR, WcStatus.SUCCESS)
    rig.peer.process.wait(60)


def _dissect(pcap: Path) -> list[dict[str, list[str]]]:
    """What Wireshark makes of each packet, as far as these fields go."""
    fields = [
        "frame.protocols", "infiniband.bth.opcode", "infiniband.bth.destqp", "infiniband.invariant.crc",
        "_ws.malformed", "_ws.expert.message", "infiniband.mad.attributeid", "ip.id",
    ]  # fmt: skip
    words = ["tshark", "-r", str(pcap), "-T", "json"]
    for field in fields:
        words += ["-e", field]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return [packet["_source"]["layers"] for packet in json.loads(done.stdout)]


@needs_tshark
def test_a_capture_opens_in_wireshark_without_a_complaint(processes: Processes, tmp_path: Path) -> None:
    own, other = tmp_path / "own.pcap", tmp_path / "other.pcap"
    rig = Rig(processes, own, other)
    try:
        _talk(rig)
        rig.disconnect()
    finally:
        rig.program.close()
    rig.peer.process.wait(60)
    for capture in (own, other):
        packets = _dissect(capture)
        assert len(packets) > 256
        assert not [packet for packet in packets if "_ws.malformed" in packet]
        assert not [packet["_ws.expert.message"] for packet in packets if "_ws.expert.message" in packet]
        assert all("infiniband" in packet["frame.protocols"][0] for packet in packets)
        seen = {int(packet["infiniband.bth.opcode"][0], 0) for packet in packets}
        # SEND only, WRITE first and middle, READ request, READ response middle, ACK, UD SEND only.
        assert {0x04, 0x06, 0x07, 0x0C, 0x0E, 0x11, 0x64} <= seen
        attributes = {int(packet["infiniband.mad.attributeid"][0], 0)
                      for packet in packets if "infiniband.mad.attributeid" in packet}  # fmt: skip
        assert attributes == {0x10, 0x13, 0x14, 0x15, 0x16}
