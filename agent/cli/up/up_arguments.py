"""The options of `g35 up`, and what their words may be. Everything is checked before anything is made.

A word that is wrong raises `typer.BadParameter` (exit code 2), which names the option and what is allowed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, cast

import typer

from agent.config.configuration import PATHS_MAX, parse_size
from agent.config.listen_address import parse_listen_address
from agent.errors import ConfigError
from agent.host_os.cpu_idle import StayAwake
from agent.pool.map.document import VALUE_BYTES_MAX, VALUE_BYTES_MIN, SuiteName
from agent.sizes import typed_size

ENCLOSURES_MAX = 64
DRIVES_MAX = 256
DRIVE_BYTES_MAX = 1 << 50
READ_DEADLINE_MS = {"tcp": 50.0, "rdma": 500.0}
"""An emulated NIC takes milliseconds for a block, on busy cores tens of them; a real one would not."""

Transport: TypeAlias = Literal["tcp", "rdma"]
"""The transports that an enclosure here can serve: NVMe/TCP, or NVMe/RDMA over emulated NICs."""
Door: TypeAlias = Literal["fuse", "pyfuse3"]
"""How the kernel's FUSE requests are served."""
Write: TypeAlias = Literal["through", "back", "second-use"]
"""When a put into `kv` is acknowledged."""
Media: TypeAlias = Literal["files", "memory"]
"""Where the drives of the enclosures keep their bytes."""


def check_captures(transport: Transport) -> None:
    """Refuse `--pcap` where there is no emulated NIC whose packets could be captured."""
    if transport != "rdma":
        raise typer.BadParameter(
            "captures are of emulated RDMA NICs: it wants --transport rdma", param_hint="--pcap"
        )


def size_between(least: int, most: int, step: int = 4096) -> Callable[[str], str]:
    """A check of an option's text: a size within these bounds, in whole steps."""

    def check(text: str) -> str:
        try:
            size = int(cast(int, parse_size(text)))
        except (ValueError, OverflowError):
            size = -1
        if not least <= size <= most:
            raise typer.BadParameter(
                f"{text!r} is no size from {typed_size(least)} to {typed_size(most)}; "
                "write for example 64K, 1M or 2.5G"
            )
        if size % step:
            raise typer.BadParameter(f"{text!r} is no multiple of {typed_size(step)}")
        return text

    return check


value_size_option = size_between(VALUE_BYTES_MIN, VALUE_BYTES_MAX)
drive_size_option = size_between(1 << 20, DRIVE_BYTES_MAX)
memory_option = size_between(0, 1 << 44)
token_option = size_between(0, VALUE_BYTES_MAX, step=1)
"""What a token weighs; no multiple of anything."""


def metrics_option(text: str) -> str:
    """Empty for none, or a loopback address and a port."""
    if text:
        try:
            parse_listen_address(text)
        except ConfigError as error:
            raise typer.BadParameter(f"{error}; {error.advice}") from None
    return text


@dataclass(frozen=True)
class UpOptions:
    """What the user of `g35 up` chooses."""

    transport: Annotated[
        Transport, typer.Option(help="tcp: NVMe/TCP; rdma: NVMe/RDMA over emulated NICs.")
    ] = "tcp"
    enclosures: Annotated[
        int, typer.Option(min=0, max=ENCLOSURES_MAX, help="How many enclosures; 0 only with --local.")
    ] = 2
    drives: Annotated[int, typer.Option(min=1, max=DRIVES_MAX, help="Drives in each enclosure.")] = 2
    drive_size: Annotated[str, typer.Option(callback=drive_size_option, help="Size of each drive.")] = "1G"
    media: Annotated[
        Media,
        typer.Option(
            help="files: sparse files, which survive a restart; memory: faster, and empty after it."
        ),
    ] = "files"
    prefault: Annotated[
        bool, typer.Option(help="With --media memory: allocate all of it at once; for measurements.")
    ] = False
    mount: Annotated[
        Path | None,
        typer.Option(parser=Path, metavar="<path>", help="Where to mount; default: mnt in the state folder."),
    ] = None
    state: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            help="Folder for drives, keys and logs; default: g35 in $XDG_STATE_HOME or ~/.local/state.",
        ),
    ] = None
    value_size: Annotated[
        str,
        typer.Option(
            callback=value_size_option, help="Largest value that the volume `kv` takes; 64K to 16M."
        ),
    ] = "1M"
    chunk_size: Annotated[
        str,
        typer.Option(
            callback=value_size_option, help="Files of /shared are stored in chunks of this size; 64K to 16M."
        ),
    ] = "1M"
    suite: Annotated[
        SuiteName,
        typer.Option(help="Cipher suite of a new pool; plain+crc64 stores values in clear."),
    ] = "aes-256-gcm"
    door: Annotated[
        Door, typer.Option(help="fuse: our own FUSE door; pyfuse3: the reference, by that package.")
    ] = "fuse"
    workers: Annotated[
        int,
        typer.Option(
            min=0, max=64, help="Threads of each process of the agent; 0: one for each core, at least 2."
        ),
    ] = 0
    processes: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            help="Processes of the agent; all serve gets and take the bytes of puts. 0: one for each 4 "
            "cores, at most 4.",
        ),
    ] = 0
    read_deadline_ms: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=60_000,
            help="A get of /kv that takes longer is a miss; default: 50, over emulated RDMA 500.",
        ),
    ] = None
    ports: Annotated[
        int,
        typer.Option(
            min=1, max=PATHS_MAX + 1, help="TCP ports of each enclosure, each a path to its drives."
        ),
    ] = 1
    local: Annotated[
        Path | None,
        typer.Option(
            parser=Path,
            metavar="<file>",
            help="A file or device of this machine in the pool, beside the enclosures; a file that is "
            "missing is made, of --drive-size.",
        ),
    ] = None
    shared: Annotated[
        bool,
        typer.Option(help="Other agents use the pool, too: look on flash before a key counts as absent."),
    ] = False
    files: Annotated[
        bool, typer.Option(help="A new pool has /fs and /shared; with --no-files /kv alone.")
    ] = True
    virtiofs: Annotated[
        bool, typer.Option("--virtiofs", help="Serve the pool as a virtio-fs device, too; see g35 host.")
    ] = False
    learn: Annotated[bool, typer.Option("--learn", help="Read ahead what is likely to follow a prefix.")] = (
        False
    )
    write: Annotated[
        Write,
        typer.Option(
            help="When a put into `kv` is acknowledged. through: on flash; back: in the agent's memory; "
            "second-use: as through, but a full volume stores a key only when it is put again."
        ),
    ] = "through"
    prefill_tokens_per_s: Annotated[
        float,
        typer.Option(
            min=0,
            max=1e9,
            help="Tokens a second that the engine computes. A get that would take longer is a miss at once.",
        ),
    ] = 0.0
    bytes_per_token: Annotated[
        str,
        typer.Option(callback=token_option, help="KV-cache bytes of a token, for --prefill-tokens-per-s."),
    ] = "0"
    s3: Annotated[
        bool, typer.Option("--s3", help="Serve S3 clients on loopback, too; says where the access key is.")
    ] = False
    s3_rdma: Annotated[
        bool, typer.Option("--s3-rdma", help="With --s3: objects move by RDMA, too, over an emulated NIC.")
    ] = False
    query: Annotated[
        bool,
        typer.Option("--query", help="Answer routers on loopback, too; says where the token is."),
    ] = False
    spill: Annotated[
        Path | None,
        typer.Option(
            parser=Path,
            metavar="<path>",
            help="G4: a folder, which has to exist, for up to 64 GiB of values that are evicted from `kv`.",
        ),
    ] = None
    prestage_memory: Annotated[
        str,
        typer.Option(callback=memory_option, help="Memory of the agent for prestaged values; 0: none."),
    ] = "256M"
    stay_awake: Annotated[
        StayAwake,
        typer.Option(
            help="Requests that keep processors from sleeping, which takes root. short: values up to 128 "
            "KiB; auto: all, where no two processors share a core, else short; always; never."
        ),
    ] = "auto"
    metrics: Annotated[
        str,
        typer.Option(
            callback=metrics_option,
            help="Loopback address and port for Prometheus metrics, such as 127.0.0.1:9035; default: none.",
        ),
    ] = ""
    pcap: Annotated[
        Path | None,
        typer.Option(help="With --transport rdma: a folder for a capture of each emulated NIC's packets."),
    ] = None
    restart: Annotated[bool, typer.Option(help="Start enclosures and agent again when they die.")] = True
    detach_: Annotated[
        bool, typer.Option("--detach", help="Return once the pool is up; g35 down ends it.")
    ] = False

    @property
    def deadline_ms(self) -> float:
        """`read_deadline_ms`, with the transport's default."""
        return READ_DEADLINE_MS[self.transport] if self.read_deadline_ms is None else self.read_deadline_ms

    @property
    def namespaces(self) -> int:
        """How many a new pool has."""
        return self.enclosures * self.drives + (self.local is not None)

    def check(self) -> None:
        if (self.prefill_tokens_per_s > 0) != (parse_size(self.bytes_per_token) != 0):
            raise typer.BadParameter(
                "--prefill-tokens-per-s and --bytes-per-token go together", param_hint="--bytes-per-token"
            )
        if self.s3 and not self.files:
            raise typer.BadParameter("objects lie in the volumes of /fs: it wants --files", param_hint="--s3")
        if self.spill is not None and not self.spill.is_dir():
            raise typer.BadParameter(f"there is no folder {self.spill}; make it", param_hint="--spill")
        if self.s3_rdma and not self.s3:
            raise typer.BadParameter("it is a way of S3's objects: it wants --s3", param_hint="--s3-rdma")
        if self.ports > 1 and self.transport != "tcp":
            raise typer.BadParameter("several ports of an enclosure are of TCP", param_hint="--ports")
        if not self.enclosures and self.local is None:
            raise typer.BadParameter(
                "a pool without an enclosure lies on a device of this machine: it wants --local",
                param_hint="--enclosures",
            )
        if self.local is not None and self.media == "memory":
            raise typer.BadParameter(
                "drives in memory are new at each start, and this one is not: it wants --media files",
                param_hint="--local",
            )
        if self.pcap is not None:
            check_captures(self.transport)
