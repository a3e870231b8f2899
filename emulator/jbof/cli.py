"""The command line of the enclosure: `python -m emulator.jbof`, which a user sees as `g35 jbof`.

Without a command it serves until SIGINT or SIGTERM. Exit codes: 0 it worked, 1 it did not, 2 the arguments
are wrong.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import signal
import sys
import threading
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from emulator.jbof.control import ControlServer
from emulator.jbof.control_client import ControlError, ask
from emulator.jbof.drive_folder import write_atomically
from emulator.jbof.drive_model import DriveModelSettings
from emulator.jbof.enclosure import (
    MAX_PORTS,
    Enclosure,
    EnclosureError,
    EnclosureSettings,
)
from emulator.jbof.host_secrets import GroupName, HashName, read_host_secrets
from emulator.jbof.rpc.server import RpcServer
from emulator.jbof.sizes import parse_size
from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.linux_limits import Need, check_limits, refusal, tell_refusals

app = typer.Typer(
    name="g35 jbof",
    help="Serve flash drives over NVMe/TCP or NVMe/RDMA, and make them fail.",
    rich_markup_mode=None,
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
)
fault = typer.Typer(
    rich_markup_mode=None,
    help="Set a fault in a running enclosure, or take it away (heal).",
    no_args_is_help=True,
)
app.add_typer(fault, name="fault")


class Media(StrEnum):
    """Where the drives keep their bytes."""

    FILES = "files"
    MEMORY = "memory"


class TransportName(StrEnum):
    """How hosts reach the enclosure."""

    TCP = "tcp"
    RDMA = "rdma"


_DESCRIPTORS: Final = 16384
"""For connections of several listeners, drives in folders and sockets of clients."""

_PROGRAM_BYTES: Final = 320 << 20
"""Python, its libraries, an emulated NIC, buffers of connections."""
_THREADS: Final = 24
_FILES: Final = 64

_SWITCH_INTERVAL_S = 0.0005
"""Python hands the interpreter on every 5 ms by default: too long when many connections want a few
microseconds each between system calls."""


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


_Size = Annotated[int, typer.Option(parser=_size, metavar="SIZE")]


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    drives: Annotated[
        int | None, typer.Option(help="How many drives; without it 1, and with --rpc nothing at all.")
    ] = None,
    kv_drives: Annotated[
        int,
        typer.Option(help="How many drives of the KV command set, behind the others and of the same size."),
    ] = 0,
    drive_size: Annotated[
        int, typer.Option(parser=_size, metavar="SIZE", help="Size of each, such as 512M or 1G.")
    ] = "1G",  # type: ignore[assignment]  # typer parses the default as well
    media: Annotated[
        Media | None,
        typer.Option(help="Keep the drives in files or in memory; default: files if there is a --folder."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Keep the drives as sparse files in here; without it, in memory.")
    ] = None,
    transport: Annotated[
        list[TransportName] | None,
        typer.Option(help="tcp (the default), rdma on an emulated RoCE device at --address, or both."),
    ] = None,
    address: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0: any that is free; with RDMA alone 4420.")
    ] = 0,
    ports: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_PORTS,
            help="TCP ports to serve the same drives at, one behind the other; with several, ANA.",
        ),
    ] = 1,
    name: Annotated[str, typer.Option(help="Name of the enclosure; makes its NQN.")] = "jbof",
    nqn: Annotated[str | None, typer.Option(help="The subsystem's NQN, if it is to be another.")] = None,
    lba_bytes: Annotated[int, typer.Option(help="Bytes of a logical block, 512 or 4096.")] = 4096,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="NQN of a host that may connect (repeat); without it, every host."),
    ] = None,
    host_secret_file: Annotated[
        Path | None,
        typer.Option(
            help="Hosts that may connect, and have to authenticate: a file of mode 0600 with lines "
            "HOST_NQN HOST_SECRET [CONTROLLER_SECRET]."
        ),
    ] = None,
    dhchap_hash: Annotated[
        list[HashName] | None,
        typer.Option(help="Hash for authentication (repeat, the preferred one first); without it, all."),
    ] = None,
    dhchap_group: Annotated[
        list[GroupName] | None,
        typer.Option(
            help="DH group for authentication (repeat, the preferred one first); without it, ffdhe2048, "
            "ffdhe3072, ffdhe4096."
        ),
    ] = None,
    control: Annotated[Path | None, typer.Option(help="Unix socket for `fault` and `stats`.")] = None,
    rpc: Annotated[
        Path | None,
        typer.Option(help="Unix socket for SPDK's JSON-RPC; without --drives all is made there."),
    ] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Write the ready line's JSON here as well.")] = None,
    max_transfer: Annotated[
        int, typer.Option(parser=_size, metavar="SIZE", help="Largest data of one command (MDTS).")
    ] = "2M",  # type: ignore[assignment]
    in_capsule: Annotated[
        int,
        typer.Option(parser=_size, metavar="SIZE", help="TCP: largest write sent unasked (IOCCSZ)."),
    ] = "1056K",  # type: ignore[assignment]
    digests: Annotated[bool, typer.Option(help="Grant digests to hosts that ask for them.")] = True,
    read_latency_ms: Annotated[float, typer.Option(min=0, help="Drive model, per read.")] = 0.0,
    write_latency_ms: Annotated[float, typer.Option(min=0, help="Drive model, per write.")] = 0.0,
    bandwidth_mib_s: Annotated[float, typer.Option(min=0, help="Drive model, per drive; 0: no limit.")] = 0.0,
    iops: Annotated[float, typer.Option(min=0, help="Drive model, per drive; 0: no limit.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the drive model and of chance in faults.")] = 0,
    prefault: Annotated[
        bool, typer.Option(help="Take the memory of drives in memory at once, not at their first write.")
    ] = False,
    pcap: Annotated[
        Path | None, typer.Option(help="RDMA: a folder for the capture of the emulated device's packets.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log connections too.")] = False,
) -> None:
    """Serve drives until interrupted; says `ready` and where, as JSON, on a line of its own."""
    if context.invoked_subcommand is not None:
        return
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if media is Media.FILES and folder is None:
        raise typer.BadParameter("say where the files lie: --folder", param_hint="--media")
    if media is Media.MEMORY and folder is not None:
        raise typer.BadParameter("drives in memory have no --folder", param_hint="--media")
    if pcap is not None:
        if TransportName.RDMA not in (transport or ()):
            raise typer.BadParameter("--pcap captures an emulated RDMA device: it wants --transport rdma")
        # Here, for the emulated NIC is a third of all that there is to import, and few enclosures have one.
        from emulator.roce.runtime.registry import capture_into

        try:
            capture_into(pcap)
        except OSError as error:
            raise typer.BadParameter(f"--pcap {pcap}: {error.strerror or error}") from None
    try:
        credentials = read_host_secrets(host_secret_file, dhchap_hash, dhchap_group, allow_host or [])
        settings = EnclosureSettings(
            drives=1 if drives is None else drives,
            kv_drives=kv_drives,
            drive_bytes=drive_size,
            folder=folder,
            transports=tuple(each.value for each in transport or [TransportName.TCP]),
            address=address,
            port=port,
            ports=ports,
            name=name,
            nqn=nqn,
            lba_bytes=lba_bytes,
            allowed_hosts=frozenset(allow_host or credentials) or None,
            credentials=credentials,
            model=DriveModelSettings(
                read_latency_s=read_latency_ms / 1000,
                write_latency_s=write_latency_ms / 1000,
                bandwidth_bytes_per_s=bandwidth_mib_s * (1 << 20),
                commands_per_s=iops,
                seed=seed,
            ),
            controller=ControllerSettings(max_transfer_bytes=max_transfer, in_capsule_bytes=in_capsule),
            tcp=TcpSettings(
                max_h2c_data=max(max_transfer, 4096),
                allow_header_digest=digests,
                allow_data_digest=digests,
            ),
            seed=seed,
            prefault=prefault,
            bare=rpc is not None and drives is None and not kv_drives,
        )
    except (EnclosureError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    tell_refusals()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    _raise_descriptor_limit()
    try:
        check_limits(_need(settings))
        _serve(settings, control, rpc, ready_file)
    except Exception as error:
        found = refusal(error)
        if found is None and not isinstance(error, EnclosureError | OSError | ValueError):
            raise
        typer.echo(f"g35 jbof: {error if found is None else '; '.join(found)}", err=True)
        raise typer.Exit(1) from None


def _need(settings: EnclosureSettings) -> Need:
    """What serving two hosts takes. Others are turned away where there is no more."""
    count = settings.drives + settings.kv_drives
    drives = count * settings.drive_bytes if settings.folder is None else 0
    return Need("this enclosure", _PROGRAM_BYTES + drives, _THREADS, _FILES + count)


def _raise_descriptor_limit() -> None:
    """Up to what this process may have: a connection takes two, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _serve(
    settings: EnclosureSettings, control: Path | None, rpc: Path | None, ready_file: Path | None
) -> None:
    stop = threading.Event()
    failures: list[str] = []

    def fail(why: str) -> None:
        failures.append(why)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with Enclosure(settings, fail) as enclosure, contextlib.ExitStack() as at_the_end:
        if control is not None:
            at_the_end.callback(ControlServer(enclosure, control).close)
        if rpc is not None:
            at_the_end.callback(RpcServer(enclosure, rpc).close)
        where = {"control": str(control) if control else None, "rpc": str(rpc) if rpc else None}
        ready = json.dumps(enclosure.describe() | where)
        if ready_file is not None:
            write_atomically(ready_file, ready + "\n")
            at_the_end.callback(ready_file.unlink, missing_ok=True)
        typer.echo(f"ready {ready}")
        sys.stdout.flush()
        stop.wait()
        if failures:
            # Of no use any more, and its supervisor begins it anew once the process has ended.
            raise EnclosureError(failures[0])


# --- the verbs that talk to a running one ---------------------------------------------------------------

_Control = Annotated[Path, typer.Option("--control", help="The enclosure's control socket.")]
_OneDrive = Annotated[int, typer.Option("--drive", min=0, help="Number of the drive, from 0.")]
_AnyDrive = Annotated[
    int | None, typer.Option("--drive", min=0, help="Number of the drive; without it, all.")
]
_Offset = Annotated[int, typer.Option(parser=_size, metavar="SIZE", help="First byte.")]
_Length = Annotated[int, typer.Option(parser=_size, metavar="SIZE", help="Bytes.")]
_Probability = Annotated[float, typer.Option(min=0, max=1, help="Share of the commands that are hit.")]


def _tell(control: Path, verb: str, **fields: Any) -> None:
    try:
        answer = ask(control, verb, **fields)
    except ControlError as error:
        typer.echo(f"g35 jbof: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(answer, indent=2))


@app.command()
def stats(control: _Control) -> None:
    """Counters of every drive, as JSON."""
    _tell(control, "stats")


@fault.command()
def slow(
    control: _Control,
    latency_ms: Annotated[float, typer.Option(min=0, help="Added to every command; 0 takes it away.")],
    drive: _AnyDrive = None,
) -> None:
    """A slow drive."""
    _tell(control, "slow", drive=drive, latency_ms=latency_ms)


@fault.command()
def hang(control: _Control, drive: _AnyDrive = None) -> None:
    """A drive that takes commands and never answers."""
    _tell(control, "hang", drive=drive)


@fault.command()
def error(
    control: _Control,
    status: Annotated[str, typer.Option(help="Name (write_fault) or number (0x280).")],
    drive: _AnyDrive = None,
    probability: _Probability = 1.0,
    operation: Annotated[
        list[str] | None, typer.Option(help="read, write, flush, ... (repeat); without it, all.")
    ] = None,
    do_not_retry: Annotated[bool, typer.Option(help="Set the Do Not Retry bit.")] = False,
) -> None:
    """A drive that fails commands with a status."""
    _tell(
        control,
        "error",
        drive=drive,
        status=status,
        probability=probability,
        operations=operation or [],
        do_not_retry=do_not_retry,
    )


@fault.command()
def flip(
    control: _Control,
    drive: _OneDrive,
    offset: _Offset = "0",  # type: ignore[assignment]
    length: Annotated[
        int | None, typer.Option(parser=_size, metavar="SIZE", help="Bytes; without it, to the end.")
    ] = None,
    bits: Annotated[int, typer.Option(min=1, help="How many bits.")] = 1,
    on_read: Annotated[bool, typer.Option(help="In what reads return, not in what is stored.")] = False,
    probability: _Probability = 1.0,
) -> None:
    """Flipped bits in what is stored, or with --on-read returned."""
    _tell(
        control,
        "flip",
        drive=drive,
        offset=offset,
        length=length,
        bits=bits,
        on_read=on_read,
        probability=probability,
    )


@fault.command()
def zero(control: _Control, drive: _OneDrive, offset: _Offset, length: _Length) -> None:
    """A range of a drive that has become zeros."""
    _tell(control, "zero", drive=drive, offset=offset, length=length)


@fault.command()
def copy(control: _Control, drive: _OneDrive, source: _Offset, offset: _Offset, length: _Length) -> None:
    """A misplaced write: bytes at --source are at --offset as well."""
    _tell(control, "copy", drive=drive, source=source, offset=offset, length=length)


@fault.command()
def full(control: _Control, drive: _AnyDrive = None) -> None:
    """A drive that refuses writes: Capacity Exceeded."""
    _tell(control, "full", drive=drive)


@fault.command("lose-writes")
def lose_writes(control: _Control, drive: _AnyDrive = None, probability: _Probability = 1.0) -> None:
    """A drive that acknowledges writes and does not store them."""
    _tell(control, "lose-writes", drive=drive, probability=probability)


@fault.command()
def model(
    control: _Control,
    drive: _AnyDrive = None,
    read_latency_ms: Annotated[float, typer.Option(min=0)] = 0.0,
    write_latency_ms: Annotated[float, typer.Option(min=0)] = 0.0,
    bandwidth_mib_s: Annotated[float, typer.Option(min=0)] = 0.0,
    iops: Annotated[float, typer.Option(min=0)] = 0.0,
    jitter: _Probability = 0.0,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Imitate a drive of this speed. Without options it is as fast as the machine."""
    _tell(
        control,
        "model",
        drive=drive,
        read_latency_ms=read_latency_ms,
        write_latency_ms=write_latency_ms,
        bandwidth_mib_s=bandwidth_mib_s,
        iops=iops,
        jitter=jitter,
        seed=seed,
    )


@fault.command()
def remove(control: _Control, drive: _OneDrive) -> None:
    """Pull a drive out."""
    _tell(control, "remove", drive=drive)


@fault.command()
def add(
    control: _Control,
    drive: Annotated[
        int | None, typer.Option(min=0, help="A drive that was pulled out; without it, a new one.")
    ] = None,
    size: Annotated[
        int | None, typer.Option(parser=_size, metavar="SIZE", help="Of a new one; as the others by default.")
    ] = None,
) -> None:
    """Put a drive back in, or a new one."""
    _tell(control, "add", drive=drive, size=size)


_PortNumber = Annotated[int, typer.Option("--number", min=1, help="Number of the port, from 1.")]


@fault.command()
def port(
    control: _Control,
    number: _PortNumber,
    up: Annotated[bool, typer.Option("--up/--down", help="Serve it again, or cut it off.")] = False,
) -> None:
    """Cut one of several ports off, or serve it again. All its connections end."""
    _tell(control, "port", number=number, up=up)


@fault.command()
def access(
    control: _Control,
    number: _PortNumber,
    state: Annotated[
        str,
        typer.Option(help="optimized, non-optimized, inaccessible, persistent-loss or change."),
    ],
) -> None:
    """How one of several ports reaches the drives (ANA)."""
    _tell(control, "access", number=number, state=state)


@fault.command()
def heal(control: _Control, drive: _AnyDrive = None) -> None:
    """No faults any more. Drives pulled out stay out, damaged bytes stay damaged."""
    _tell(control, "heal", drive=drive)


@fault.command()
def kill(control: _Control) -> None:
    """SIGKILL for the whole enclosure."""
    _tell(control, "kill")


def main() -> None:
    """The entry point of `python -m emulator.jbof`."""
    app(prog_name="g35 jbof")
