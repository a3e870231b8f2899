"""G4 on the kernel's NFS: a folder that a server of this guest exports and its client mounts.

A server that is gone is what an operator's NFS does at times. With `hard` the client waits for it for ever,
with `soft` it gives up with an error; gets must not wait in either case, and nothing may come up wrong.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.pool.counters import MissCause
from agent.spill.folder import FolderTarget
from agent.spill.target import TargetError
from tests.support.lab.kernel_host import drop_caches
from tests.support.lab.kernel_nfs import KernelNfs
from tests.support.pool.memory_pool import key_of
from tests.support.pool.spill_pool import SpillingAgent, evict_all, full, value_of
from tests.support.waiting import wait_until

USED = range(8)
"""The values that were read before their eviction, and so have copies."""
DEADLINE_SECONDS = 4.0
GET_SECONDS = 20.0
"""Far above the deadline of a get: emulated, Python takes its time. A mount that hangs takes for ever."""
BACK_SECONDS = 240.0


@pytest.fixture
def server() -> Iterator[KernelNfs]:
    # The guest's own /tmp and /run are tmpfs, which the kernel exports.
    folder = Path("/run/nfs-served")
    folder.mkdir(exist_ok=True)
    nfs = KernelNfs(folder)
    yield nfs
    nfs.stop()


def evicted(target: FolderTarget) -> SpillingAgent:
    """A pool of one set whose values of USED are in G4 alone."""
    spilling = full(target)
    spilling.health.deadline = DEADLINE_SECONDS
    evict_all(spilling)
    return spilling


def bundles(server: KernelNfs) -> list[Path]:
    return [path for path in server.folder.rglob("*") if path.is_file()]


def store(target: FolderTarget, name: str, ended: threading.Event) -> None:
    """Whether that is refused or waits is the mount's matter; it ends once the server is back."""
    with contextlib.suppress(TargetError):
        target.put(name, memoryview(bytes(1 << 20)))
    ended.set()


def got(spilling: SpillingAgent) -> list[bytes | MissCause]:
    """Each of USED; none took long. Time passes for the agent, so that a place left alone is asked again."""
    found = []
    for number in USED:
        spilling.agent.channel.clock += 60.0
        began = time.monotonic()
        found.append(spilling.agent.get(key_of(number)))
        assert time.monotonic() - began < GET_SECONDS
    return found


def are_there(spilling: SpillingAgent) -> bool:
    return got(spilling) == [value_of(number) for number in USED]


@pytest.mark.parametrize("options", ["hard", "soft,timeo=10,retrans=1"])
def test_a_server_that_is_gone_is_late_and_is_there_again(server: KernelNfs, options: str) -> None:
    with server.mounted(Path("/run/nfs-mounted"), options) as mount:
        spilling = evicted(target := FolderTarget(mount))
        assert spilling.spiller.counts.bundles > 0
        assert bundles(server)
        wait_until(lambda: are_there(spilling), BACK_SECONDS, "values from NFS")

        drop_caches()
        server.stop()
        assert set(got(spilling)) == {MissCause.G4_LATE}
        # Who stores there may hang in the mount; puts and gets of flash do not.
        name = str(bundles(server)[0].relative_to(server.folder).with_name("fffff"))
        ended = threading.Event()
        threading.Thread(target=store, args=(target, name, ended), daemon=True).start()
        spilling.agent.put(key_of(4999), value_of(4999))
        assert spilling.agent.get(key_of(4999)) == value_of(4999)

        server.start()
        wait_until(lambda: are_there(spilling), BACK_SECONDS, "values from a server that is back")
        assert ended.wait(BACK_SECONDS)
        target.close()


def test_what_the_server_lost_or_damaged_is_a_miss_with_its_cause(server: KernelNfs) -> None:
    with server.mounted(Path("/run/nfs-mounted"), "hard,noac,lookupcache=none") as mount:
        spilling = evicted(target := FolderTarget(mount))
        wait_until(lambda: are_there(spilling), BACK_SECONDS, "values from NFS")
        for path in bundles(server):
            path.write_bytes(bytes(each ^ 0xFF for each in path.read_bytes()))
        drop_caches()
        assert set(got(spilling)) == {MissCause.G4_CORRUPT}
        for path in bundles(server):
            path.unlink()
        drop_caches()
        assert set(got(spilling)) <= {MissCause.G4_LOST, MissCause.EVICTED, MissCause.NEVER_STORED}
        target.close()
