"""The agent as its unit starts it: another user, one capability, no executable memory that can be written.

systemd sets these up from the unit; here setpriv(1) and prctl(2) do, with what the unit says. The rest of its
restrictions (system calls, address families, devices) take systemd itself: `make deploy`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.fs.doors.mounting import is_mounted
from tests.support.leaks import unmount_below
from tests.support.needs import needs, why_no_mount_as_root, why_no_program
from tests.support.processes import Processes, Started
from tests.support.waiting import wait_until

NOBODY = 65534
PR_SET_MDWE = 65
"""Since Linux 6.3: what MemoryDenyWriteExecute= forbids, as a property of the process."""
CONFINE = (
    f"import ctypes, os, sys; assert ctypes.CDLL(None).prctl({PR_SET_MDWE}, 1, 0, 0, 0) == 0;"
    "os.execv(sys.executable, [sys.executable, '-P', '-m', 'agent.cli', *sys.argv[1:]])"
)


def _why_not() -> str | None:
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) < (6, 3):
        return f"Linux {os.uname().release} has no PR_SET_MDWE: boot Linux 6.3 or newer"
    return why_no_program("setpriv", "util-linux") or why_no_mount_as_root()


pytestmark = needs(_why_not())


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that the confined user may enter; pytest's own are closed to it."""
    folder = Path(tempfile.mkdtemp(prefix="g35-confined-"))
    folder.chmod(0o755)
    yield folder
    unmount_below(folder)
    shutil.rmtree(folder)


def _configuration(place: Path, enclosure_port: int) -> Path:
    file = place / "agent.toml"
    file.write_text(f"""
[agent]
mount = "{place}/mnt"
state = "{place}/state"
key_file = "{place}/credentials/root.key"
read_deadline_ms = 2000
[[enclosures]]
name = "shelf"
address = "127.0.0.1"
port = {enclosure_port}
nqn = "nqn.2026-01.io.g35:shelf"
[[volumes]]
name = "kv"
value_size = "64K"
share = 1.0
""")
    return file


def _enclosure(processes: Processes, place: Path) -> int:
    started = processes.g35("jbof", "--name", "shelf", "--drives", "2", "--drive-size", "64M")
    line = started.wait_for_line("ready")
    return int(line.partition('"port": ')[2].partition(",")[0])


def _agent(processes: Processes, place: Path, file: Path) -> Started:
    confined = [
        "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs",
        "--inh-caps=-all,+sys_admin", "--ambient-caps=-all,+sys_admin", "--bounding-set=-all,+sys_admin",
    ]  # fmt: skip
    return processes.start(
        [*confined, sys.executable, "-P", "-c", CONFINE, "agent", "--config", file],
        environment={
            "NOTIFY_SOCKET": str(place / "notify"),
            "WATCHDOG_USEC": "100000",
            "CREDENTIALS_DIRECTORY": str(place / "credentials"),
        },
    )


def test_a_service_with_one_capability_serves_says_so_and_ends(processes: Processes, place: Path) -> None:
    for name in ("state", "mnt", "credentials"):
        (place / name).mkdir(mode=0o755)
    for name in ("state", "mnt"):
        os.chown(place / name, NOBODY, NOBODY)
    file = _configuration(place, _enclosure(processes, place))
    g35 = [sys.executable, "-P", "-m", "agent.cli"]
    key = place / "credentials/root.key"
    for words in (["key", "new", str(key)], ["pool", "format", "--config", str(file)]):
        subprocess.run([*g35, *words], check=True, capture_output=True, timeout=60)
    # What the format left is root's, and systemd would hand the key to the service.
    for path in (key, key.parent, *place.glob("state/*")):
        os.chown(path, NOBODY, NOBODY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(place / "notify"))
        os.chown(place / "notify", NOBODY, NOBODY)
        manager.settimeout(60)
        agent = _agent(processes, place, file)
        heard: list[str] = []

        def hears(word: str) -> bool:
            heard.append(manager.recv(4096).decode())
            return word in heard[-1]

        wait_until(lambda: hears("READY=1"), 60, "READY=1")
        assert f"STATUS=serving {place}/mnt" in heard[-1]
        status = Path(f"/proc/{agent.pid}/status").read_text()
        assert f"Uid:\t{NOBODY}\t{NOBODY}" in status
        for kind in ("CapEff", "CapPrm", "CapBnd"):
            assert f"{kind}:\t0000000000200000" in status, status
        value = place / "mnt/kv/kv/value"
        value.write_bytes(b"sealed " * 5000)
        assert value.read_bytes() == b"sealed " * 5000
        secret = key.read_bytes().split(b":")[1]
        for told in ("environ", "cmdline"):
            assert secret not in Path(f"/proc/{agent.pid}/{told}").read_bytes()
        heard.clear()
        for _ in range(3):
            wait_until(lambda: hears("WATCHDOG=1"), 60, "the watchdog's food")
        agent.process.terminate()
        wait_until(lambda: hears("STOPPING=1"), 60, "STOPPING=1")
    assert agent.process.wait(60) == 0
    assert not is_mounted(place / "mnt")
    assert "Traceback" not in agent.output
