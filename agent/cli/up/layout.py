"""The state folder of `g35 up`: what lies where.

lock           locked for as long as a `g35 up` lives; in it, that one's process id
up.json        what is served: process id, the mount; present while the pool is up
up.log         what `g35 up --detach` would have said
root.key       the pool's root key, made at the first start
agent.toml     the agent's configuration, written anew at every start
agent/         the agent's own state
agent.pid      present while the mount is served
virtiofs.sock  where the agent's virtio-fs device listens, with --virtiofs
s3.credentials the access key of the S3 door, made at the first start with --s3; s3.port its port
s3.address     the address on loopback of the S3 door's RDMA device, with --s3-rdma
query.tokens   the token of the query door, made at the first start with --query; query.port its port
local.port     the port at which the agent serves the device of --local to other agents
jbof-N.address the address on loopback of enclosure N's RDMA device, where it has one
jbof-N.json    where enclosure N listens; jbof-N.sock its control socket, jbof-N.log its words
drives-N/      its drives, where they are files
made_with.json what the pool on these drives was formatted with
mnt/           the mount, unless --mount names another folder
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Set
from dataclasses import asdict, dataclass
from pathlib import Path

from agent.errors import G35Error, UserError
from agent.fs.doors.mounting import is_mounted
from agent.host_os.whole_file import write_whole


def default_state() -> Path:
    """Where `g35 up` keeps its things unless --state says otherwise (XDG Base Directory 0.8)."""
    base = os.environ.get("XDG_STATE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local/state") / "g35"
    except RuntimeError:
        raise UserError("this user has no home folder", "--state takes the folder for the pool") from None


@dataclass(frozen=True, slots=True)
class Running:
    """What `up.json` says: the process that holds everything, and the mount."""

    pid: int
    mount: str
    enclosures: int


class Layout:
    """Paths in one state folder."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.running_file = state / "up.json"
        self.log = state / "up.log"
        self.key = state / "root.key"
        self.configuration = state / "agent.toml"
        self.agent_state = state / "agent"
        self.agent_ready = state / "agent.pid"
        self.agent_process = state / "agent-process.pid"
        self.agent_log = state / "agent.log"
        self.virtiofs_socket = state / "virtiofs.sock"
        self.s3_credentials = state / "s3.credentials"
        self.s3_port = state / "s3.port"
        self.s3_address = state / "s3.address"
        self.query_tokens = state / "query.tokens"
        self.query_port = state / "query.port"
        self.local_port = state / "local.port"
        self.made_with = state / "made_with.json"
        self.default_mount = state / "mnt"
        self.lock = state / "lock"

    def make_folder(self) -> None:
        """Make the state folder where there is none. Raises UserError where a file has its name."""
        try:
            self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(
                f"--state {self.state}: {error.filename} is a file, not a folder", "name a folder"
            ) from None

    def enclosure(self, number: int, suffix: str) -> Path:
        return self.state / f"jbof-{number}.{suffix}"

    def drives(self, number: int) -> Path:
        return self.state / f"drives-{number}"

    def has_drives(self) -> bool:
        return any(self.state.glob("drives-*/*"))

    def try_lock(self) -> int | None:
        """The lock on the folder, for as long as the descriptor is open, by us or a child that has it from
        us; None where a `g35 up` or `g35 down` holds it.
        """
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.ftruncate(descriptor, 0)  # its last signer may be killed, and its id another's
        return descriptor

    def take_lock(self) -> int:
        """`try_lock` that raises UserError where another holds it."""
        descriptor = self.try_lock()
        if descriptor is None:
            raise UserError(
                f"a pool is up already in {self.state}, or is coming up or going down",
                f"g35 status --state {self.state} shows it, g35 down --state {self.state} ends it",
            )
        return descriptor

    def sign_lock(self, descriptor: int) -> None:
        """Say in the lock that this process is the one to end; it listens to SIGTERM by now."""
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def sign_off(self, descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.close(descriptor)

    def lock_holder(self) -> int | None:
        """Who has signed the lock; nobody yet, where it was taken a moment ago."""
        try:
            return int(self.lock.read_text())
        except (FileNotFoundError, ValueError):
            return None

    def remove_leftovers(self) -> bool:
        """Remove what only a running `g35 up` has: who runs, and control sockets. Whether there was any."""
        found = [
            path
            for pattern in ("up.json", "agent.pid", "agent-process.pid", "jbof-*.json", "jbof-*.sock",
                            "virtiofs.sock", "jbof-*.pid", "*.part")
            for path in self.state.glob(pattern)
        ]  # fmt: skip
        for path in found:
            path.unlink(missing_ok=True)
        return bool(found)

    def files(self) -> set[Path]:
        """Everything in the folder, but for logs, the lock and what is mounted."""
        found = {path for pattern in ("*", "drives-*/*", "agent/*") for path in self.state.glob(pattern)}
        return {path for path in found if path.suffix != ".log" and path != self.lock}

    def remove_new(self, before: Set[Path]) -> None:
        """Remove what has come since `files` was `before`; a folder only if it is empty."""
        for path in sorted(self.files() - before, reverse=True):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                with contextlib.suppress(OSError):
                    path.rmdir()

    def running(self) -> Running | None:
        """What is up in this folder; None where nothing is, or where what was has died."""
        found = self._last_running()
        return found if found is not None and is_alive(found.pid) else None

    def mounts_left(self) -> list[Path]:
        """Where something is mounted still, be it by a `g35 up` that was killed."""
        places = {self.default_mount}
        with contextlib.suppress(G35Error):
            found = self._last_running()
            places |= {Path(found.mount)} if found else set()
        return [each for each in places if is_mounted(each)]

    def _last_running(self) -> Running | None:
        try:
            return Running(**json.loads(self.running_file.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            raise G35Error(f"{self.running_file} is damaged", "remove it once no g35 process runs") from None

    def write_running(self, running: Running) -> None:
        write_whole(self.running_file, json.dumps(asdict(running)))


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
