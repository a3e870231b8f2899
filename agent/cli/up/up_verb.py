"""`g35 up`: enclosures, a formatted pool, the agent and its mount, until Ctrl-C."""

import contextlib
import gc
import importlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn

import typer

from agent.cli.main import main
from agent.cli.record_options import options_of
from agent.cli.status_document import read_status
from agent.cli.up.agent_toml import agent_toml, check_room
from agent.cli.up.children import Child, detach, end_process, told_by
from agent.cli.up.folder_trouble import told_of_full_disk, told_of_owner
from agent.cli.up.interrupts import Interrupts
from agent.cli.up.layout import Layout, Running, default_state, is_alive
from agent.cli.up.made_with import Formatted, check_media, options_of_before
from agent.cli.up.rdma_addresses import free_address_from
from agent.cli.up.ready_message import TYPED_COMMAND, ready_message, typed_command
from agent.cli.up.stale_metadata import set_aside
from agent.cli.up.up_arguments import UpOptions
from agent.errors import G35Error, UserError
from agent.fs.doors.mounting import clear_dead_mount
from agent.host_os.forked_process import fork, may_fork, show_words
from agent.host_os.private_memory import keep_memory_private
from agent.inline.secrets import create_root_key
from agent.local.device import read_label
from agent.query.access_tokens import new_tokens_file
from agent.s3.credentials import new_credentials_file
from agent.sizes import counted

TEND_SECONDS = 0.05
"""How soon an end of a child is noticed: an agent that is killed serves again the sooner."""
DETACHED_LOOK_SECONDS = 0.05
DETACHED_END_SECONDS = 45.0
"""For a process that ends an agent and all enclosures in their order."""
FREE_PORT_TRIES = 100
G35 = (sys.executable, "-P", "-m", "agent.cli")
LOADED_ONCE = ("agent.cli.agent_verb", "agent.cli.pool_verb")
_LOCK_FROM_PARENT = "G35_UP_LOCK"
"""In the environment of a detached `g35 up`: the descriptor of the folder's lock, taken by its parent."""


@options_of(UpOptions)
def up(context: typer.Context, options: UpOptions) -> None:
    """Start a whole pool on this machine. Prints `ready` once it is mounted; Ctrl-C ends it."""
    layout = Layout((options.state or default_state()).absolute())
    interrupts = Interrupts()
    with interrupts.noted(), told_of_owner(layout.state), told_of_full_disk(layout.state):
        _up(context, options, layout, interrupts)


def _up(context: typer.Context, options: UpOptions, layout: Layout, interrupts: Interrupts) -> None:
    where = (options.mount or layout.default_mount).absolute()
    check_media(layout, options.media)
    if options.media == "files":
        options = UpOptions(**options_of_before(layout, vars(options), partial(_is_given, context)))
    options.check()
    if options.media == "memory" or not layout.has_drives():
        check_room(options)
    layout.make_folder()
    if options.pcap is not None:
        # The emulated NICs of all processes look here (docs/roce.md); the agent knows nothing of them.
        options.pcap.mkdir(parents=True, exist_ok=True)
        os.environ["G35_ROCE_PCAP"] = str(options.pcap.absolute() / "{device}.pcap")
    lock = int(os.environ.pop(_LOCK_FROM_PARENT, "-1"))
    if lock < 0:
        lock = layout.take_lock()
    s3_was = layout.s3_port.read_text().strip() if options.s3 and layout.s3_port.exists() else ""
    if options.detach_:
        if not _detached(layout, lock, _paths_of(options, layout), interrupts.stop):
            _leave_unserved(interrupts)
        print(ready_message(layout, where, options, s3_was), flush=True)
        return
    there = layout.files()
    pool = _Pool(layout, where, options)
    stop = interrupts.stop
    layout.sign_lock(lock)
    is_up = False
    try:
        if not stop.is_set():
            with told_of_full_disk(layout.state):  # before what it made is removed, which makes room
                pool.start(stop)
        if not stop.is_set():
            pool.warn_of_what_is_away()
            is_up = True
            print(ready_message(layout, where, options, s3_was), flush=True)
        while not stop.wait(TEND_SECONDS) and not pool.was_unmounted():
            if options.restart:
                pool.tend()
    finally:
        pool.stop()
        if not is_up:
            pool.remove_what_it_made(there)
        layout.sign_off(lock)
    if not is_up:
        _leave_unserved(interrupts)


def _leave_unserved(interrupts: Interrupts) -> NoReturn:
    """The end of a start that a signal has cut short: nothing was served, so it has not worked."""
    print("interrupted before the pool was up; nothing of it runs", file=sys.stderr)
    raise typer.Exit(interrupts.exit_code)


def _is_given(context: typer.Context, option: str) -> bool:
    """Whether the user typed the option, so that its value is no default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _paths_of(options: UpOptions, layout: Layout) -> dict[str, Path]:
    """By option, all paths of a call, and that of the state folder, which every call has."""
    typed = {f"--{name.replace('_', '-')}": value for name, value in vars(options).items()}
    return {name: value for name, value in typed.items() if isinstance(value, Path)} | {
        "--state": layout.state
    }


def _detached(layout: Layout, lock: int, paths: Mapping[str, Path], stop: threading.Event) -> bool:
    """Run the same command again without --detach, in a session of its own, and wait for its `ready`.

    Whether that came. Once `stop` is set, it ends the process, which a Ctrl-C at the terminal does not reach.
    """
    words = [word for word in sys.argv[1:] if word != "--detach"]
    for option, path in paths.items():
        # The last of an option counts, and the process starts in the root folder.
        words += [option, str(path.absolute())]
    os.environ[_LOCK_FROM_PARENT] = str(lock)
    os.environ[TYPED_COMMAND] = typed_command()
    process = detach([*G35, *words], layout.log, (lock,))
    os.close(lock)
    while not stop.wait(DETACHED_LOOK_SECONDS):
        said = layout.log.read_text(errors="replace").splitlines()
        if "ready" in said:
            for line in itertools.takewhile(lambda line: not line.startswith("mounted at "), said):
                print(line, file=sys.stderr)
            return True
        if process.poll() is not None:
            why = told_by("\n".join(said), process.returncode)
            raise G35Error(f"the pool did not come up: {why}", f"its words are in {layout.log}")
    end_process(process, DETACHED_END_SECONDS)
    return False


@dataclass
class _Pool:
    """Everything of one `g35 up`, in the order in which it starts."""

    _layout: Layout
    _mount: Path
    _options: UpOptions
    _enclosures: list[Child] = field(default_factory=list)
    _agent: Child | None = None
    _formatted: bool = False
    _key_is_new: bool = False
    _mount_is_new: bool = False
    _given: set[int] = field(default_factory=set)
    _set_aside: set[Path] = field(default_factory=set)

    def start(self, stop: threading.Event) -> None:
        """Bring everything up in its order; returns early once `stop` is set."""
        layout = self._layout
        is_there = layout.has_drives() or _is_labelled(self._options.local)
        are_new = self._options.media == "memory" or not is_there
        for number in range(self._options.enclosures):
            self._enclosures.append(self._enclosure(number))
        for child in self._enclosures:
            child.start()
        _load_the_agent()
        for child in self._enclosures:
            child.wait_ready(stop)
        if stop.is_set():
            return
        ready = [self._announced(number) for number in range(self._options.enclosures)]
        self._key_is_new = not layout.key.exists()
        if self._key_is_new:
            create_root_key(layout.key)
        s3_port = query_port = 0
        if self._options.s3:
            s3_port = _port_of_door(layout.s3_port, layout.s3_credentials, new_credentials_file)
        if self._options.query:
            query_port = _port_of_door(layout.query_port, layout.query_tokens, new_tokens_file)
        local_port = 0
        if self._options.local is not None:
            local_port = _free_port_from(layout.local_port, 1, self._given)
            layout.local_port.write_text(f"{local_port}\n")
        s3_address = free_address_from(layout.s3_address) if self._options.s3_rdma else ""
        ports = (s3_port, query_port, local_port)
        text = agent_toml(layout, self._mount, ready, self._options, *ports, s3_address)
        layout.configuration.write_text(text)
        self._format_if_blank(stop, are_new)
        if stop.is_set():
            return
        if are_new:
            self._set_dead_names_aside()
        clear_dead_mount(self._mount)
        if self._mount.is_file():
            raise UserError(f"--mount {self._mount}: is a file, not a folder", "name a folder")
        if not self._mount.exists():
            self._mount.mkdir(parents=True)
            self._mount_is_new = True
        layout.agent_ready.unlink(missing_ok=True)
        words = ["agent", "--config", str(layout.configuration), "--ready-file", str(layout.agent_ready)]
        self._agent = Child(
            "the agent",
            [*G35, *words],
            layout.agent_log,
            self._agent_is_ready,
            layout.agent_process,
            partial(_be_verb, words),
        )
        self._agent.start()
        self._agent.wait_ready(stop)
        layout.write_running(Running(os.getpid(), str(self._mount), self._options.enclosures))

    def remove_what_it_made(self, before: Set[Path]) -> None:
        """After a start that failed: leave nothing in the state folder that was not there `before`.

        But for logs, which say why. And nothing goes where a pool was made on drives that were there: without
        its key, which is new as well, they would be lost to a pool that nobody can open. The device of
        --local counts as one that was there: it is never removed.
        """
        if self._mount_is_new:
            with contextlib.suppress(OSError):
                self._mount.rmdir()
        carries = _is_labelled(self._options.local) or any(
            path.parent.name.startswith("drives-") for path in before
        )
        if not (self._formatted and carries):
            self._layout.remove_new(before | self._set_aside)

    def _set_dead_names_aside(self) -> None:
        for path, renamed in set_aside(self._layout):
            self._set_aside.add(renamed)
            if path.name.endswith("files.sqlite"):
                _say(f"{path} names files of a pool that is gone: it is set aside as {renamed.name}")

    def was_unmounted(self) -> bool:
        """Somebody has unmounted the pool, which ended the agent and so ends all of it."""
        return self._agent is not None and self._agent.ended_well

    def warn_of_what_is_away(self) -> None:
        """A pool that was made with more drives than there are now serves only what is there."""
        pool = read_status(self._mount)["pool"]
        if pool["namespaces_away"]:
            away = pool["namespaces_away"]
            _say(
                f"warning: {away} of the pool's {counted(pool['namespaces'], 'namespace')} "
                f"{'is' if away == 1 else 'are'} away; "
                "were --enclosures and --drives larger when it was made?"
            )
        if newcomers := pool.get("newcomers"):
            config = f"--config {quote(str(self._layout.configuration))}"
            _say(
                f"warning: {counted(len(newcomers), 'drive')} "
                f"{'is' if len(newcomers) == 1 else 'are'} not in the pool; "
                "a smaller --enclosures or --drives leaves them out\n"
                f"this takes them in:\n  {typed_command()} pool add {config}\n"
                f"this ends the move to them, once the agent has moved what belongs there:\n"
                f"  {typed_command()} pool settle {config}"
            )

    def tend(self) -> None:
        for child in [*self._enclosures, *([self._agent] if self._agent is not None else [])]:
            happened = child.tend()
            if happened is not None:
                _say(happened)

    def stop(self) -> None:
        """The agent first, so that nobody reads from an enclosure that is going."""
        if self._agent is not None:
            self._agent.stop()
            with contextlib.suppress(Exception):
                clear_dead_mount(self._mount)
        for child in self._enclosures:
            child.stop()
        self._layout.remove_leftovers()

    def _enclosure(self, number: int) -> Child:
        layout, options = self._layout, self._options
        ready = layout.enclosure(number, "json")
        # A second start, and one after a kill, listens where the agent looks for it.
        port_file = layout.enclosure(number, "port")
        if options.transport == "tcp":
            port = _free_port_from(port_file, options.ports, self._given)
            self._given.update(range(port, port + options.ports))
            where = ["--port", str(port)]
        else:
            address = free_address_from(layout.enclosure(number, "address"))
            where = ["--transport", "rdma", "--address", address]
        ready.unlink(missing_ok=True)
        command = [
            sys.executable, "-P", "-m", "emulator.jbof",
            "--name", f"jbof-{number}", *where,
            "--drives", str(options.drives), "--drive-size", options.drive_size,
            "--control", str(layout.enclosure(number, "sock")), "--ready-file", str(ready),
        ]  # fmt: skip
        if options.ports > 1:
            command += ["--ports", str(options.ports)]
        if options.prefault and options.media == "memory":
            command.append("--prefault")
        if options.media == "files":
            command += ["--folder", str(layout.drives(number))]
        return Child(
            f"enclosure jbof-{number}",
            command,
            layout.enclosure(number, "log"),
            ready.exists,
            layout.enclosure(number, "pid"),
        )

    def _announced(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._layout.enclosure(number, "json").read_text())
        if self._options.transport == "tcp":  # over RDMA all have one port, at addresses of their own
            self._layout.enclosure(number, "port").write_text(f"{found['port']}\n")
        return found

    def _format_if_blank(self, stop: threading.Event, are_new: bool) -> None:
        """Format a pool where the drives carry none. A pool that is there is never touched.

        Drives that `are_new` are not looked at first, which takes a second: a format looks as well, and is
        refused where one carries anything.
        """
        config = ["--config", str(self._layout.configuration)]
        if not are_new:
            shown = _run(["pool", "show", "--json", *config])
            if stop.is_set():
                return
            if shown.returncode:
                raise self._failed("look at the drives", shown)
            if json.loads(shown.stdout)["pool"] is not None:
                if self._key_is_new:
                    raise UserError(
                        f"the drives in {self._layout.state} carry a pool, and its root key "
                        f"{self._layout.key} is gone",
                        "bring that file back: nothing else opens the pool. For another pool, take another "
                        "--state",
                    )
                return
        self._formatted = True
        formatted = _run(["pool", "format", *config])
        if formatted.returncode:
            if not stop.is_set():
                raise self._failed("format the pool", formatted)
        elif self._options.media == "files":
            options = self._options
            Formatted(options.value_size, options.suite, options.files, options.chunk_size).write(
                self._layout
            )

    def _failed(self, what: str, ran: subprocess.CompletedProcess[str]) -> G35Error:
        said = told_by(ran.stderr, ran.returncode)
        where = f"the logs of the enclosures are in {self._layout.state}"
        return G35Error(f"cannot {what}: {said}", where)

    def _agent_is_ready(self) -> bool:
        try:
            pid = int(self._layout.agent_ready.read_text())
        except (FileNotFoundError, ValueError):
            return False
        return is_alive(pid)


def _is_labelled(local: Path | None) -> bool:
    """Whether the device of --local is a namespace already, so that a pool may lie on it."""
    if local is not None:
        with contextlib.suppress(G35Error):
            read_label(local)
            return True
    return False


def _say(what: str) -> None:
    """To the user, in lines as they are: a command in them can be copied."""
    print(what, file=sys.stderr, flush=True)


def _load_the_agent() -> None:
    """Load what the agent and the verbs of the pool consist of, while the enclosures start: each of them is a
    child that has it from here."""
    gc.disable()
    for module in LOADED_ONCE:
        importlib.import_module(module)
    # Nothing of it goes, and no child need copy it to look for garbage.
    gc.freeze()
    gc.enable()


def _be_verb(words: list[str]) -> int:
    """Be `g35` with these words, in a child."""
    show_words(["g35", *words])
    keep_memory_private()
    return main(words)


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """`g35` with these words, to its end, in a session of its own: a Ctrl-C at the terminal is for us, who
    end things in their order."""
    if not may_fork():
        return subprocess.run(
            [*G35, *words], capture_output=True, text=True, check=False, start_new_session=True
        )
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        status = fork(partial(_be_verb, words), output.fileno(), errors.fileno()).wait()
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess([*G35, *words], status, *said)


def _port_of_door(file: Path, secrets: Path, make: Callable[[Path], None]) -> int:
    """The port of a door, and what its clients prove themselves by, made where there is none."""
    port = _free_port_from(file, 1)
    file.write_text(f"{port}\n")
    if not secrets.exists():
        make(secrets)
    return port


def _free_port_from(file: Path, count: int, given: Set[int] = frozenset()) -> int:
    """The port of the last time if it is free, with the `count` - 1 behind it; else any that is.

    `given`: those that others of this start will listen on.
    """
    try:
        port = int(file.read_text())
        if given.isdisjoint(range(port, port + count)) and _are_free(port, count):
            return port
    except (OSError, ValueError):
        pass
    for _ in range(FREE_PORT_TRIES):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if given.isdisjoint(range(port, port + count)) and _are_free(port, count):
            return port
    raise G35Error(f"no {count} free ports in a row", "use fewer --ports")


def _are_free(port: int, count: int) -> bool:
    try:
        for each in range(port, port + count):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", each))
    except (OSError, OverflowError):
        return False
    return True
