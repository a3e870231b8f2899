"""tests/lab: what only a real kernel can judge. Files guest_*.py run in the guest, test_*.py here.

Where the lab cannot run (no QEMU, no kernel package to be had) all of it is skipped with the reason; with
G35_LAB_REQUIRED=1 that is a failure instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulator.lab.errors import LabUnavailableError
from emulator.lab.image import LabImage, prepare
from emulator.roce.runtime.device import Device
from tests.support.lab.guest_tests import GuestTests
from tests.support.lab.kernel_host import disconnect_all, run
from tests.support.lab.rdma_cable import Cable, far_device, why_there_is_no_cable
from tests.support.processes import Processes

HERE = Path(__file__).parent
OUTSIDE_TIMEOUT_S = 1800
"""Of a test that waits for guests: longer than the bounds of those, which say more."""
IN_GUEST = os.environ.get("G35_LAB_GUEST") == "1"

# pytest keeps what it makes of each test file here, before the guest boots: to make it takes the guest ten
# times as long. Some machines forbid it in the environment (tests/support/rungs/compiling.py).
sys.dont_write_bytecode = IN_GUEST

_guest_tests_key = pytest.StashKey[GuestTests | LabUnavailableError]()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    # A file that was named on the command line is collected by pytest itself, whatever its name.
    if not file_path.name.startswith("guest_") or parent.session.isinitpath(file_path):
        return None
    return pytest.Module.from_parent(parent, path=file_path)


def _runs_in_guest(item: pytest.Item) -> bool:
    return item.path.parent == HERE and item.path.name.startswith("guest_")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not IN_GUEST:
        for item in items:
            if _runs_in_guest(item):
                # The clock of such a test runs in the guest; GuestTests has its own for the guest.
                item.add_marker(pytest.mark.timeout(0))
            elif item.path.parent == HERE and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(OUTSIDE_TIMEOUT_S))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if IN_GUEST or not _runs_in_guest(item):
        return None
    tests = _guest_tests(item.session)
    if isinstance(tests, LabUnavailableError):
        item.add_marker(pytest.mark.skip(reason=f"the lab cannot run here: {tests}"))
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in tests.reports_of(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _guest_tests(session: pytest.Session) -> GuestTests | LabUnavailableError:
    """The one guest of this session, booted when the first guest test is due."""
    if _guest_tests_key not in session.stash:
        try:
            session.stash[_guest_tests_key] = GuestTests(
                session.config, [item for item in session.items if _runs_in_guest(item)]
            )
        except LabUnavailableError as error:
            if os.environ.get("G35_LAB_REQUIRED") == "1":
                raise
            session.stash[_guest_tests_key] = error
    return session.stash[_guest_tests_key]


def pytest_sessionfinish(session: pytest.Session) -> None:
    tests = session.stash.get(_guest_tests_key, None)
    if isinstance(tests, GuestTests):
        tests.close()


@pytest.fixture(scope="session")
def lab_image() -> Iterator[LabImage]:
    """The image that guests boot from; skips where the lab cannot run."""
    try:
        yield prepare(lambda step: None)
    except LabUnavailableError as error:
        if os.environ.get("G35_LAB_REQUIRED") == "1":
            raise
        pytest.skip(f"the lab cannot run here: {error}")


@pytest.fixture(scope="session")
def cable() -> Cable:
    """In the guest: rxe here, a network namespace for an emulated NIC at the far end."""
    reason = why_there_is_no_cable()
    if reason is not None:
        pytest.skip(reason)
    return Cable()


@pytest.fixture
def disconnected() -> Iterator[None]:
    """In the guest: the kernel's host is connected to nothing afterwards."""
    yield
    disconnect_all()


@pytest.fixture
def mount_point(tmp_path: Path) -> Iterator[Path]:
    """In the guest: a folder to mount something on."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    yield folder
    if folder.is_mount():
        run("umount", "--lazy", folder)


@pytest.fixture(scope="module")
def module_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Processes that all tests of a file share, where to start one is the slowest step."""
    processes = Processes(tmp_path_factory.mktemp("module"))
    yield processes
    processes.end_all()


@pytest.fixture
def far_nic(cable: Cable) -> Iterator[Device]:
    """The emulated NIC at the far end, in this process."""
    with far_device() as device:
        yield device
