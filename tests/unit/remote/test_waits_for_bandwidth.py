"""A put that waits for its tenant's bandwidth, beside others of its door that wait long."""

from __future__ import annotations

import threading

import pytest

from agent.pool.counters import MissCause
from agent.pool.late_answers import wait_for
from agent.pool.steps import Acquire, Steps
from agent.pool.volume.bandwidth import BURST_SECONDS, Bandwidth
from agent.remote.channel import WorkerChannel
from agent.remote.long_waits import PATIENCE_LEAST
from tests.support.sim.two_paths import BLOCK
from tests.unit.remote.test_long_waits import DATA, WRITE_DEADLINE, Rig


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, seed: int) -> Rig:
    return Rig(monkeypatch, seed)


class NeverGiven:
    """A lock of which a wait takes its whole time, by the rig's clock."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def acquire(self, blocking: bool = True, timeout: float = 0.0) -> bool:
        self._rig.clock.now += max(0.0, timeout)
        return False


def admitted(rig: Rig, debt: float) -> tuple[bool, float, Bandwidth]:
    """Whether a put of a tenant that owes so many seconds is admitted, and the time that it took."""
    bandwidth, began = Bandwidth(threading.BoundedSemaphore(1), 1000), rig.clock.now
    bandwidth.charge(rig.channel, int(1000 * (BURST_SECONDS + debt)))

    def steps(channel: WorkerChannel) -> Steps[bool]:
        channel.gives_way()
        admitting, answer = bandwidth.admit(channel, began + WRITE_DEADLINE), False
        try:
            wanted = next(admitting)
            while True:
                assert isinstance(wanted, Acquire)
                answer = yield Acquire(
                    NeverGiven(rig),  # type: ignore[arg-type]
                    wanted.deadline,
                    gives_way=wanted.gives_way,
                    is_pause=wanted.is_pause,
                )
                wanted = admitting.send(answer)
        except StopIteration as end:
            found: bool = end.value
            return found

    return rig.channel.run(steps(rig.channel)), rig.clock.now - began, bandwidth


def test_a_tenant_that_waits_for_bandwidth_leaves_a_worker_too(rig: Rig) -> None:
    """Beside a put that waits for a drive that hangs, it would be the last worker of its door."""
    assert rig.waits.take(rig.health)
    is_admitted, took, bandwidth = admitted(rig, 3.0)
    assert (is_admitted, took) == (False, pytest.approx(PATIENCE_LEAST))
    assert (bandwidth.waits, bandwidth.late) == (1, 1)
    rig.waits.give_back(rig.health)
    is_admitted, took, bandwidth = admitted(rig, 3.0)
    assert (is_admitted, took) == (True, pytest.approx(3.0))
    assert (bandwidth.waits, bandwidth.late) == (1, 0)
    assert rig.waits.take(rig.health), "its place is free again"


def test_a_put_that_waited_for_bandwidth_has_no_place_any_more(rig: Rig) -> None:
    """It has patience anew with the drive that it writes to."""
    places: list[bool] = []

    def steps(channel: WorkerChannel) -> Steps[MissCause | None]:
        channel.gives_way()
        until = rig.clock.now + 3.0
        yield Acquire(NeverGiven(rig), until, gives_way=True, is_pause=True)  # type: ignore[arg-type]
        places.append(rig.waits.take(rig.health))
        pending = channel.write(0, BLOCK, DATA)
        return (yield from wait_for(channel, pending, rig.clock.now + WRITE_DEADLINE))

    rig.paths[0].answers, began = False, rig.clock.now
    assert rig.channel.run(steps(rig.channel)) is MissCause.LATE
    assert places == [True], "others may wait now"
    assert rig.clock.now - began == pytest.approx(3.0 + PATIENCE_LEAST)
