"""The command line of the enclosure: `python -m emulator.jbof`, which a user sees as `g35 jbof`.

Without a command it serves until SIGINT or SIGTERM. Exit codes: 0 it worked, 1 it did not, 2 the arguments
are wrong.
"""

import contextlib
import inspect
import json
import logging
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperGroup

from emulator.command_line import EXIT_FAILED, run_program, tell_error, words_of
from emulator.jbof import control_requests
from emulator.jbof.control import ControlServer
from emulator.jbof.control_client import NO_ENCLOSURE, ControlError, ask
from emulator.jbof.drive_folder import write_atomically
from emulator.jbof.drive_model import DriveModelSettings
from emulator.jbof.enclosure import Enclosure, EnclosureError
from emulator.jbof.enclosure_settings import MAX_PORTS, EnclosureSettings
from nvmeof.authentication.secret import ALL_HASHES, CONTROLLER_GROUPS, Credentials
from nvmeof.authentication.secret_files import SecretFileError, read_hosts_file
from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.storage import Operation
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.linux_limits import Need, check_limits, refusal, tell_refusals
from nvmeof.thread_names import show_thread_names
from nvmeof.wire.authentication import GroupId, HashId


class _Verbs(TyperGroup):
    """Answers a mistyped word among the values of an option by the nearest known one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _near_words():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _near_words():
            return super().invoke(ctx)


@contextlib.contextmanager
def _near_words() -> Iterator[None]:
    try:
        yield
    except typer.BadParameter as wrong:
        text = wrong.message.removeprefix("Value error, ").removeprefix("Input ")
        typed, is_choice, known = text.partition(" is not one of ")
        if is_choice and "did you mean" not in text:
            near = control_requests.did_you_mean(typed.strip("'"), re.findall("'([^']*)'", known))
            text = f"{text.removesuffix('.')}{near}."
        wrong.message = text
        raise


app = typer.Typer(
    cls=_Verbs,
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


Media = StrEnum("Media", "FILES MEMORY")
"""Where the drives keep their bytes."""
TransportName = StrEnum("TransportName", "TCP RDMA")
"""How hosts reach the enclosure."""
HashName = StrEnum("HashName", "SHA256 SHA384 SHA512")
GroupName = StrEnum("GroupName", "NULL FFDHE2048 FFDHE3072 FFDHE4096 FFDHE6144 FFDHE8192")
"""Hashes and Diffie-Hellman groups of DH-HMAC-CHAP."""

_DESCRIPTORS: Final = 16384
"""For connections of several listeners, drives in folders and sockets of clients."""

_PROGRAM_BYTES: Final = 320 << 20
"""Python, its libraries, an emulated NIC, buffers of connections."""
_THREADS: Final = 24
_FILES: Final = 64

_SWITCH_INTERVAL_S = 0.0005
"""Python hands the interpreter on every 5 ms by default: too long when many connections want a few
microseconds each between system calls."""


_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def _size(text: str) -> int:
    """Bytes of `512M`, `1G`, `1.5GiB`. Binary units only, for a drive is memory or a file."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"not a size: {text!r}; write for example 512M or 1G")
    size = Decimal(match[1]) * _UNITS[match[2].upper()]
    if size > sys.maxsize:
        raise typer.BadParameter(f"{text!r} is too large: a size is less than 8 EiB")
    return int(size)


def _status(text: str) -> int:
    try:
        return control_requests.parse_status(text)
    except control_requests.RequestError as error:
        raise typer.BadParameter(str(error)) from None


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
    nqn: Annotated[
        str | None, typer.Option(help="The subsystem's NQN; without it, made of the name.")
    ] = None,
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
    link_mib_s: Annotated[
        float, typer.Option(min=0, help="Rate of the link that all drives share, each way; 0: no limit.")
    ] = 0.0,
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
        credentials = _credentials(host_secret_file, dhchap_hash, dhchap_group, allow_host or [])
        settings = EnclosureSettings(
            drives=1 if drives is None else drives,
            kv_drives=kv_drives,
            drive_bytes=drive_size,
            folder=folder,
            transports=tuple(each.value for each in transport or [TransportName.TCP]),
            address=address[1:-1] if address.startswith("[") and address.endswith("]") else address,
            port=port,
            ports=ports,
            name=name,
            nqn=nqn,
            lba_bytes=lba_bytes,
            allowed_hosts=frozenset(allow_host or credentials) or None,
            credentials=credentials,
            model=DriveModelSettings.of(
                read_latency_ms=read_latency_ms,
                write_latency_ms=write_latency_ms,
                bandwidth_mib_s=bandwidth_mib_s,
                iops=iops,
                seed=seed,
            ),
            link_bytes_per_s=link_mib_s * (1 << 20),
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
    show_thread_names()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    _raise_descriptor_limit()
    try:
        check_limits(_need(settings))
        _serve(settings, control, rpc, ready_file)
    except Exception as error:
        found = refusal(error)
        if found is None and not isinstance(error, EnclosureError | OSError | ValueError):
            raise
        tell_error(*(found or [words_of(error)]))
        raise typer.Exit(EXIT_FAILED) from None


def _credentials(
    file: Path | None, hashes: list[HashName] | None, groups: list[GroupName] | None, allowed: list[str]
) -> dict[str, Credentials]:
    """The hosts that have to authenticate, by NQN; `allowed` hosts have to be among them. ValueError."""
    if file is None:
        if hashes or groups:
            raise ValueError("--dhchap-hash and --dhchap-group want a --host-secret-file")
        return {}
    try:
        found = read_hosts_file(
            file,
            tuple(HashId[each.name] for each in hashes) if hashes else ALL_HASHES,
            tuple(GroupId[each.name] for each in groups) if groups else CONTROLLER_GROUPS,
        )
    except SecretFileError as error:
        raise ValueError(str(error)) from None
    for nqn in allowed:
        if nqn not in found:
            raise ValueError(f"--allow-host {nqn}: {file} has no secret for it")
    return found


def _need(settings: EnclosureSettings) -> Need:
    """The need of serving two hosts. Others are turned away where there is no room."""
    count = settings.drives + settings.kv_drives
    drives = count * settings.drive_bytes if settings.folder is None else 0
    return Need("this enclosure", _PROGRAM_BYTES + drives, _THREADS, _FILES + count)


def _raise_descriptor_limit() -> None:
    """Raise the limit as far as allowed: a connection takes two descriptors, and the usual limit is 1,024."""
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
            # Here, for few enclosures are configured by it.
            from emulator.jbof.rpc.server import RpcServer

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
            # Its supervisor starts it again once the process has ended.
            raise EnclosureError(failures[0])


# --- verbs for a running enclosure: each has an option for every field of its request --------------------

_Control = Annotated[Path, typer.Option("--control", help="The enclosure's control socket.")]
_FLAGS: Final = {"operations": "--operation", "up": "--up/--down"}
_TYPES: Final[dict[str, Any]] = {"status": int, "operations": list[Operation]}
_PARSERS: Final = dict.fromkeys(("offset", "length", "source", "size"), _size) | {"status": _status}


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    flags = [_FLAGS[name]] if name in _FLAGS else []
    kind: Any = _TYPES.get(name, field.annotation)
    parser = _PARSERS.get(name)
    metavar = None if parser is None else parser.__name__.strip("_").upper()
    described = typer.Option(*flags, help=field.description, parser=parser, metavar=metavar)
    default: Any = inspect.Parameter.empty
    if name == "operations":
        default = None
    elif not field.is_required():
        # A default goes through the parser as well, which takes text.
        default = field.default if parser is None or field.default is None else str(field.default)
    annotation = Annotated[kind, described]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _verb_of(verb: str, request: type[control_requests.Request]) -> Callable[..., None]:
    def tell(*, control: Path, **given: Any) -> None:
        try:
            checked = control_requests.checked_request(
                {"verb": verb} | {n: v for n, v in given.items() if v is not None}
            )
        except control_requests.RequestError as error:
            raise typer.BadParameter(str(error)) from None
        try:
            answer = ask(control, verb, **checked.model_dump(mode="json", exclude_none=True))
        except ControlError as error:
            tell_error(str(error), "" if error.was_answered else NO_ENCLOSURE)
            raise typer.Exit(EXIT_FAILED) from None
        typer.echo(json.dumps(answer, indent=2))

    control = inspect.Parameter("control", inspect.Parameter.KEYWORD_ONLY, annotation=_Control)
    options = [_option(name, field) for name, field in request.model_fields.items()]
    tell.__signature__ = inspect.Signature([control, *options])  # type: ignore[attr-defined]
    tell.__doc__ = request.__doc__
    return tell


for _verb, _request in control_requests.VERBS.items():
    (app if _verb == "stats" else fault).command(_verb)(_verb_of(_verb, _request))


def main() -> None:
    """The entry point of `python -m emulator.jbof`."""
    run_program(app, "g35 jbof")
