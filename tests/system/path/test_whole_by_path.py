"""A value by path is absent or whole, whatever ends the processes that write it, on a real mount."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from host_shim.control_wire import key_of_name
from tests.support.pool_up import PoolUp
from tests.support.waiting import wait_until

HALF = 300_000
WHOLE = bytes(range(256)) * 2400
"""More than two units, and no multiple of a page."""

PRELUDE = f"""
import os, signal, subprocess, sys, threading, time
whole = bytes(range(256)) * 2400
first, second = whole[:{HALF}], whole[{HALF}:]
path = sys.argv[1]
def opened():
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(path: Path, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + program, path], capture_output=True, text=True, timeout=60
    )


def is_there(pool: PoolUp, name: str) -> bytes | None:
    """The value as a session gets it."""
    with pool.pool() as client:
        return client.volume("kv").get(key_of_name(name.encode()))


DEATHS = {
    "killed between two writes": "fd = opened(); os.write(fd, first); die()",
    "killed amid a write": """
fd = opened()
os.write(fd, first)
threading.Timer(0.0, die).start()
while True:
    os.pwrite(fd, whole[:4096], 1 << 40)
""",
    "stopped by SIGTERM": "fd = opened(); os.write(fd, first); os.kill(os.getpid(), 15); time.sleep(9)",
    "ended by a fault": "fd = opened(); os.write(fd, first); os.abort()",
    "failed with a status": "fd = opened(); os.write(fd, first); os._exit(3)",
    "killed after an fsync": "fd = opened(); os.write(fd, first); os.fsync(fd); die()",
    "killed by a child that holds the file": """
fd = opened()
os.write(fd, first)
parent, (r, w) = os.getpid(), os.pipe()
if os.fork() == 0:
    os.kill(parent, signal.SIGKILL)
    time.sleep(0.2)
    os._exit(0)
time.sleep(9)
""",
    "killed while a thread of its own writes": """
fd = opened()
def write():
    os.write(fd, first)
    die()
threading.Thread(target=write).start()
time.sleep(9)
""",
    "ended by another thread's exit amid a write": """
fd = opened()
started = threading.Event()
def write():
    os.write(fd, first)
    started.set()
    time.sleep(9)
threading.Thread(target=write, daemon=True).start()
started.wait()
os._exit(0)
""",
    "ended by another thread's exec, with a table of files of its own": """
import ctypes
started = threading.Event()
def write():
    assert ctypes.CDLL(None).unshare(0x400) == 0  # CLONE_FILES
    fd = opened()
    os.write(fd, first)
    started.set()
    time.sleep(9)
threading.Thread(target=write, daemon=True).start()
started.wait()
os.execv("/bin/true", ["true"])
""",
    "a writer that was given the file is killed": """
fd = opened()
child = "import os; os.write(1, bytes(1000)); os.kill(os.getpid(), 9)"
subprocess.run([sys.executable, "-c", child], stdout=fd)
try:
    os.close(fd)
except OSError:
    pass
""",
    "its maker is killed after one of two writers": """
fd = opened()
subprocess.run(["head", "-c", "1000", "/dev/zero"], stdout=fd)
die()
""",
    "killed after a close of one of two descriptors, with 1,100 others": """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
others = [os.dup(0) for _ in range(1100)]
fd = opened()
copy = os.dup(fd)
os.write(fd, first)
os.close(copy)
time.sleep(0.1)
die()
""",
    "killed after a close of one of two descriptors, with 200 others": """
others = [os.dup(0) for _ in range(200)]
fd = opened()
copy = os.dup(fd)
os.write(fd, first)
os.close(copy)
time.sleep(0.1)
die()
""",
}  # fmt: skip


@pytest.mark.parametrize("name", DEATHS)
def test_a_process_that_dies_stores_nothing(whole_pool: PoolUp, name: str) -> None:
    path = whole_pool.mount / "kv/kv" / name
    run(path, DEATHS[name])
    wait_until(lambda: no_writer(whole_pool), 30, "the file to be closed by all")
    assert is_there(whole_pool, name) is None
    assert not path.exists()
    # The slot is free, and the key is as good as any other.
    path.write_bytes(WHOLE)
    assert is_there(whole_pool, name) == WHOLE == path.read_bytes()


def no_writer(pool: PoolUp) -> bool:
    """No process but the agent's has a file of the volume open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).startswith(str(pool.mount / "kv/kv")):
                return False
        except OSError:
            continue
    return True


WAYS = {
    "by an explicit close": "fd = opened(); os.write(fd, first); os.write(fd, second); os.close(fd)",
    "by a file object": "open(path, 'wb').write(whole)",
    "by a process with 900 other descriptors": """
others = [os.dup(0) for _ in range(900)]
open(path, 'wb').write(whole)
""",
    "by exit(0)": "fd = opened(); os.write(fd, first); os.write(fd, second); os._exit(0)",
    "by a process that has the file as its output": """
child = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 2400)"
with open(path, 'wb') as file:
    subprocess.run([sys.executable, '-c', child], stdout=file)
""",
    "by two processes, one after another": """
with open(path, 'wb') as file:
    for part in (first, second):
        subprocess.run(['cat'], input=part, stdout=file)
""",
    "by one descriptor of several": """
fd = opened()
copy = os.dup(fd)
os.write(copy, first)
os.close(copy)
assert not os.path.exists(path)
os.write(fd, second)
os.close(fd)
""",
    "by threads": """
fd = opened()
for part in (first, second):
    writer = threading.Thread(target=os.write, args=(fd, part))
    writer.start()
    writer.join()
closer = threading.Thread(target=os.close, args=(fd,))
closer.start()
closer.join()
""",
    "while a child comes and goes that has the file as well": """
fd = opened()
os.set_inheritable(fd, True)
os.write(fd, first)
subprocess.run(['true'], close_fds=False)
subprocess.run(['true'])
if os.fork() == 0:
    os._exit(0)
os.wait()
if os.fork() == 0:
    die()
os.wait()
os.write(fd, second)
os.close(fd)
""",
    "of a length that was declared, and the process is killed": """
fd = opened()
os.ftruncate(fd, len(whole))
assert os.fstat(fd).st_size == len(whole)
os.write(fd, first)
os.write(fd, second)
die()
""",
    "of a length that was allocated": """
fd = opened()
os.posix_fallocate(fd, 0, len(whole))
os.write(fd, first)
os.write(fd, second)
os.close(fd)
""",
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_a_value_is_whole_once_its_writers_have_closed_it(whole_pool: PoolUp, name: str) -> None:
    path = whole_pool.mount / "kv/kv" / name
    ended = run(path, WAYS[name])
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    assert is_there(whole_pool, name) == WHOLE
    assert path.read_bytes() == WHOLE
    with path.open("rb") as file:
        assert os.fstat(file.fileno()).st_size == len(WHOLE)


BY_EXEC = """
fd = opened()
assert not os.get_inheritable(fd)  # O_CLOEXEC
os.write(fd, first)
os.write(fd, second)
os.execv("/bin/true", ["true"])
"""
KEPT_OVER_EXEC = """
fd = opened()
os.write(fd, first)
os.dup2(fd, 1)
os.execv("/bin/sleep", ["sleep", "60"])
"""


def test_a_value_that_exec_closes_is_whole_once_nobody_has_it(whole_pool: PoolUp) -> None:
    path = whole_pool.mount / "kv/kv/by exec"
    assert run(path, BY_EXEC).returncode == 0
    wait_until(lambda: is_there(whole_pool, "by exec") == WHOLE, 30, "the value")


def test_an_exec_that_keeps_a_descriptor_has_not_closed_the_value(whole_pool: PoolUp) -> None:
    path = whole_pool.mount / "kv/kv/kept over exec"
    writer = subprocess.Popen([sys.executable, "-c", PRELUDE + KEPT_OVER_EXEC, path])
    comm = Path(f"/proc/{writer.pid}/comm")
    wait_until(lambda: comm.read_text() == "sleep\n", 20, "the exec")
    assert is_there(whole_pool, "kept over exec") is None
    writer.kill()
    writer.wait()
    wait_until(lambda: no_writer(whole_pool), 30, "the file to be closed by all")
    assert is_there(whole_pool, "kept over exec") is None


def test_a_process_with_more_descriptors_than_are_looked_at_stores_whole_values(whole_pool: PoolUp) -> None:
    path = whole_pool.mount / "kv/kv/many descriptors"
    limits = "resource.getrlimit(resource.RLIMIT_NOFILE)[1]"
    raised = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (2000, {limits}))"
    run(path, f"{raised}; others = [os.dup(0) for _ in range(1100)]; open(path, 'wb').write(whole)")
    wait_until(lambda: is_there(whole_pool, path.name) == WHOLE, 30, "the value to be complete")


@pytest.mark.parametrize(
    "script",
    [
        "cat $source > $target",
        "cp $source $target",
        "dd if=$source of=$target bs=64k",
        "dd if=$source of=$target bs=1M conv=fsync",
        "(head -c 100000 $source; tail -c +100001 $source) > $target",
        "{ head -c 100000 $source; tail -c +100001 $source; } > $target",
        "exec 3> $target; head -c 100000 $source >&3; tail -c +100001 $source >&3; exec 3>&-",
        "exec 3> $target; printf a >&3; printf b >&3; exec 3>&-; rm $target; cat $source > $target",
        "head -c 1000000 $source | tee $target > /dev/null",
        "cat $source | sh -c 'cat; exit 0' > $target",
        "install -m 600 $source $target",
    ],
)
def test_what_shells_and_tools_write_is_whole(whole_pool: PoolUp, tmp_path: Path, script: str) -> None:
    source = tmp_path / "source"
    source.write_bytes(WHOLE)
    target = whole_pool.mount / "kv/kv" / tmp_path.name
    environment = {**os.environ, "source": str(source), "target": str(target)}
    subprocess.run(["sh", "-c", script], env=environment, check=True, timeout=60)
    assert is_there(whole_pool, target.name) == WHOLE


def test_a_declared_length_keeps_a_prefix_out_whoever_closes(whole_pool: PoolUp) -> None:
    path = whole_pool.mount / "kv/kv/declared and closed"
    ended = run(path, "fd = opened(); os.ftruncate(fd, len(whole)); os.write(fd, first); os.close(fd)")
    assert f"[Errno {errno.EINVAL}]" in ended.stderr
    assert is_there(whole_pool, path.name) is None
    second = run(path, "fd = opened(); os.write(fd, whole); os.ftruncate(fd, 5)")
    assert f"[Errno {errno.EPERM}]" in second.stderr
