"""Boot a guest, run one script in it, get its output and exit status; QEMU is always gone at the end.

    result = run_in_guest([".venv/bin/python", "-m", "pytest", "..."], timeout_s=120)

The guest sees this machine's whole file system, read-only, under a layer in its own memory. One folder is
shared: `Guest.exchange` here, /run/g35 there, with the script, its output and status, and files of tests. The
only network is the guest's loopback.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from emulator.lab.accelerator import ACCELERATOR_OPTIONS, ENDS_WITH_US, QEMU, choose_accelerator
from emulator.lab.cache import REPOSITORY
from emulator.lab.errors import GuestDiedError, GuestTimedOutError
from emulator.lab.guest_files import Allowance, Follower, copy_plain_files, remove_folder, status_in, tail_of
from emulator.lab.image import LabImage, prepare

EXCHANGE_IN_GUEST = Path("/run/g35")
# Of a guest's output in memory: its end.
OUTPUT_LIMIT = 4 << 20
POLL_S = 0.05
# A walk through a folder takes longer than a look at a file.
EXCHANGE_POLL_S = 1.0
# The guest's script makes this file before anything else.
BEGUN = "begun"
# Under emulation a kernel sometimes dies while it boots (`kernel_line`), for no reason of ours.
BOOTS = 3
PANIC = "Kernel panic"
SCRATCH_PREFIX = "g35-lab-"

# The guest starts with an empty environment.
GUEST_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "linux",
    "G35_LAB_GUEST": "1",
}

LIBRARIES = Path("/usr/lib", sysconfig.get_config_var("MULTIARCH") or "")
WATCHED = (
    *(Path("/var/lib/dpkg/status"), Path("/var/lib/dpkg/info"), Path("/var/lib/dpkg/updates")),
    *(Path("/etc/ld.so.cache"), Path("/usr/bin"), Path("/usr/sbin"), Path("/usr/lib"), LIBRARIES),
    *(Path(sys.prefix, "bin"), Path(sysconfig.get_path("platlib"))),
)
"""Files and folders that an installation by dpkg or pip changes."""


class RootWatch:
    """Whether this machine's root changes while a guest runs on it. A check costs a stat(2) for each place.

    The guest reads programs and libraries from here, and relies on their standing still (`cache=loose` in
    init.sh). A package that is installed meanwhile gives it halves of two libraries: programs end by SIGSEGV.
    """

    def __init__(self, places: Sequence[Path] = WATCHED) -> None:
        self._places = places
        self._before = self._stamps()

    def _stamps(self) -> dict[Path, tuple[int, int, int]]:
        found = {}
        for place in self._places:
            try:
                stat = os.stat(place)
            except OSError:
                continue
            found[place] = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        return found

    def what_changed(self) -> str:
        """A sentence that names the changed places; empty where there are none."""
        now = self._stamps()
        changed = [str(each) for each in self._places if now.get(each) != self._before.get(each)]
        if not changed:
            return ""
        return (
            f"this machine's root, which is the guest's, changed while the guest ran ({', '.join(changed)}): "
            "install nothing meanwhile, and run it again"
        )


@dataclass(frozen=True, slots=True)
class FileSystemDevice:
    """A virtio-fs device with a vhost-user back-end at the end of a connected socket, `descriptor`.

    `queue_size` (a power of two, at most 1024) bounds the pages of one request: the guest's kernel takes four
    entries for headers. The guest uses at most one request queue for each core.
    """

    tag: str
    descriptor: int
    request_queues: int
    queue_size: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """The virtual machine. With `reboots`, a guest that resets itself boots and runs its script again."""

    memory_mib: int = 2048
    cores: int = 2
    devices: tuple[FileSystemDevice, ...] = ()
    reboots: bool = False


@dataclass(frozen=True, slots=True)
class GuestResult:
    """`status` as a shell reports it (128 + signal), `output` both streams, `seconds` with the boot."""

    status: int
    output: str
    seconds: float


class Guest:
    """One virtual machine that runs one script. A context manager: leaving it ends the machine.

    `command` is an argument vector or the text of a shell script; it runs as root in `folder` (a path of
    this machine), with `files` (name -> text) in its /run/g35. With `interactive` the guest's console is
    this terminal and there is no exit status.
    """

    def __init__(
        self,
        command: Sequence[str] | str,
        *,
        image: LabImage,
        accelerator: str = "tcg",
        folder: Path = REPOSITORY,
        files: Mapping[str, str] | None = None,
        interactive: bool = False,
        hardware: Hardware = Hardware(),
    ) -> None:
        remove_left_overs(Path(tempfile.gettempdir()))
        self._scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-"))
        self.exchange = self._scratch / "exchange"
        # Beside the exchange, not in it: the guest cannot write what counts as its console.
        self._console = self._scratch / "console"
        self._output = self.exchange / "output"
        said_by_qemu = self._scratch / "qemu"
        self._allowance = Allowance(self.exchange, self._output, self._console, said_by_qemu)
        self._exchange_checked = 0.0
        self.root = RootWatch()
        self._started = time.monotonic()
        # QEMU puts the terminal into raw mode, and does not put it back when it is killed.
        self._terminal = termios.tcgetattr(sys.stdin) if interactive and sys.stdin.isatty() else None
        try:
            (self.exchange / "results").mkdir(parents=True)
            for name, text in (files or {}).items():
                (self.exchange / name).write_text(text)
            (self.exchange / "checkout").write_text(str(REPOSITORY))
            (self.exchange / "script").write_text(guest_script(command, folder, interactive=interactive))
            self._command = qemu_command(
                image, accelerator, self.exchange, None if interactive else self._console, hardware
            )
            self._descriptors = [device.descriptor for device in hardware.devices]
            # A device of ours ends with the QEMU that it was made for.
            self._boots_left = 0 if interactive or hardware.devices else BOOTS - 1
            self._qemu = self._boot(interactive)
        except BaseException:
            remove_folder(self._scratch)
            raise

    def _boot(self, interactive: bool) -> subprocess.Popen[bytes]:
        with (self._scratch / "qemu").open("wb") as said:
            return subprocess.Popen(
                self._command,
                stdin=None if interactive else subprocess.DEVNULL,
                stdout=None if interactive else said,
                stderr=None if interactive else said,
                # Ctrl-C is for us to act on: QEMU must not end before its output has been read.
                start_new_session=not interactive,
                pass_fds=self._descriptors,
            )

    def __enter__(self) -> "Guest":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """QEMU's process id."""
        return self._qemu.pid

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def output(self) -> str:
        """The last OUTPUT_LIMIT bytes of the script's output so far."""
        return tail_of(self._output, OUTPUT_LIMIT)

    def console(self) -> str:
        """The output of the guest's kernel and QEMU so far."""
        return tail_of(self._console, OUTPUT_LIMIT) + tail_of(self._scratch / "qemu", OUTPUT_LIMIT)

    def running(self) -> bool:
        """Whether the guest is on. It powers off when its script has ended.

        A guest whose kernel died before the script began is booted again, BOOTS times in all.
        """
        if self._qemu.poll() is None:
            return True
        if not self._boots_left or self.has_begun() or PANIC not in self.console():
            return False
        self._boots_left -= 1
        self._qemu = self._boot(interactive=False)
        return True

    def result(self) -> GuestResult:
        """The outcome of a guest that no longer runs. Raises GuestDiedError if it left none,
        ExchangeMisusedError."""
        try:
            status = status_in(self.exchange / "status")
        except (OSError, ValueError):
            changed = self.root.what_changed()
            raise GuestDiedError(
                f"the guest ended without an exit status (QEMU: {self._qemu.returncode})"
                + (f"\n{changed}" if changed else ""),
                self.output(),
                self.console(),
            ) from None
        return GuestResult(status, self.output(), self.seconds)

    def wait(self, timeout_s: float, on_output: Callable[[str], None] | None = None) -> GuestResult:
        """Wait for the guest to power off, and pass its script's output on as it comes.

        At the deadline, `timeout_s` from the boot, the guest is ended, even while `on_output` blocks. Raises
        GuestTimedOutError and GuestDiedError, which carry the output; ExchangeMisusedError,
        GuestTookTooMuchError.
        """
        follower = Follower(self._output)
        late = threading.Event()

        def end_it() -> None:
            late.set()
            self._qemu.kill()

        deadline = threading.Timer(max(0.0, timeout_s - self.seconds), end_it)
        deadline.daemon = True
        deadline.start()
        try:
            while self.running():
                if on_output:
                    follower.pass_on(on_output)
                self.check_allowance()
                time.sleep(POLL_S)
        finally:
            deadline.cancel()
            deadline.join()
        if on_output:
            follower.pass_on(on_output)
        if late.is_set():
            raise GuestTimedOutError(timeout_s, self.output(), self.console())
        self._allowance.check_printed()
        return self.result()

    def check_allowance(self) -> None:
        """Raises GuestTookTooMuchError where the guest fills this machine's disk."""
        self._allowance.check_printed()
        if time.monotonic() - self._exchange_checked > EXCHANGE_POLL_S:
            self._allowance.check_exchange(self.pid)
            self._exchange_checked = time.monotonic()

    def copy_results(self, folder: Path) -> None:
        """End the guest, and copy the plain files that the script left in /run/g35/results.

        Raises GuestTookTooMuchError, ExchangeMisusedError, OSError of this machine's.
        """
        self._end()
        copy_plain_files(self.exchange / "results", folder)

    def has_begun(self) -> bool:
        return os.path.lexists(self.exchange / BEGUN)

    def _end(self) -> None:
        self._qemu.kill()
        self._qemu.wait()
        if self._terminal is not None:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, self._terminal)

    def close(self) -> None:
        """End the machine if it still runs, and remove its files."""
        self._end()
        remove_folder(self._scratch)


def run_in_guest(
    command: Sequence[str] | str,
    timeout_s: float,
    *,
    folder: Path = REPOSITORY,
    on_output: Callable[[str], None] | None = None,
    results: Path | None = None,
) -> GuestResult:
    """Prepare the lab if need be, boot it, run `command` (argument vector, or text of a script) in it.

    The files that the command leaves in /run/g35/results are copied into the folder `results`.
    Raises LabUnavailableError, GuestTimedOutError, GuestDiedError. A status other than 0 is a result.
    """
    image = prepare(lambda step: None)
    with Guest(command, image=image, accelerator=choose_accelerator(image), folder=folder) as guest:
        try:
            return guest.wait(timeout_s, on_output)
        finally:
            if results:
                guest.copy_results(results)


def guest_script(command: Sequence[str] | str, folder: Path, *, interactive: bool = False) -> str:
    """The script that the guest runs: environment, working folder, then the command.

    It first makes the file BEGUN. An interactive one begins a line of its own.
    """
    lines = [f": > {EXCHANGE_IN_GUEST / BEGUN}" + ("; echo" if interactive else "")]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in GUEST_ENVIRONMENT.items()]
    lines.append(f"cd {shlex.quote(str(folder))} || exit 125")
    lines.append(command if isinstance(command, str) else f"exec {shlex.join(command)}")
    return "\n".join(lines) + "\n"


def qemu_command(
    image: LabImage, accelerator: str, exchange: Path, console: Path | None, hardware: Hardware
) -> list[str]:
    """QEMU's arguments. `console` is the file for the serial console; None means this terminal."""
    return [
        *(*ENDS_WITH_US, str(os.getpid()), QEMU, *ACCELERATOR_OPTIONS[accelerator]),
        *("-nodefaults", "-no-user-config", "-display", "none", "-net", "none"),
        *(() if hardware.reboots else ("-no-reboot",)),
        *("-m", f"{hardware.memory_mib}M", "-smp", str(hardware.cores)),
        *("-kernel", str(image.kernel), "-initrd", str(image.initramfs)),
        *("-append", kernel_line(hardware.cores, shell=console is None)),
        *("-serial", f"file:{console}" if console else "mon:stdio"),
        *("-virtfs", _share(Path("/"), "machine") + ",readonly=on"),
        *("-virtfs", _share(exchange, "exchange")),
        *_devices(hardware),
    ]


def kernel_line(cores: int, *, shell: bool) -> str:
    """The kernel's command line.

    The kernel boots on one core; init.sh adds the others when the modules are loaded. A booting kernel
    patches its own code by way of breakpoints, and QEMU's emulation can show another core a breakpoint that
    the kernel no longer expects: "Oops: int3".
    """
    words = ["console=ttyS0", "quiet", "panic=-1"]
    if cores > 1:
        words += ["maxcpus=1", "noreplace-smp"]
    if shell:
        words.append("lab.shell")
    return " ".join(words)


def _devices(hardware: Hardware) -> list[str]:
    """Virtio-fs devices. The guest's memory is a memfd, so that their back-end can map it."""
    if not hardware.devices:
        return []
    words = [
        *("-object", f"memory-backend-memfd,id=memory,size={hardware.memory_mib}M,share=on"),
        *("-machine", "memory-backend=memory"),
    ]
    for number, device in enumerate(hardware.devices):
        words += [
            *("-chardev", f"socket,id=device{number},fd={device.descriptor}"),
            "-device",
            f"vhost-user-fs-pci,chardev=device{number},tag={_doubled(device.tag)},"
            f"num-request-queues={device.request_queues},queue-size={device.queue_size}",
        ]
    return words


def remove_left_overs(temporary: Path) -> None:
    """Remove the folders of guests whose process was killed (QEMU died with it)."""
    for folder in temporary.glob(f"{SCRATCH_PREFIX}*-*"):
        owner = folder.name.removeprefix(SCRATCH_PREFIX).split("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            remove_folder(folder)


def _share(path: Path, tag: str) -> str:
    return f"local,path={_doubled(os.fspath(path))},mount_tag={tag},security_model=none,multidevs=remap"


def _doubled(value: str) -> str:
    """QEMU's option syntax: a comma in a value is doubled."""
    return value.replace(",", ",,")
