"""The agent's configuration: one TOML file, checked as a whole before anything starts.

Unknown keys are refused: a mistyped key that is silently ignored is a setting that is silently wrong. Every
default stands here and in docs/reference/configuration.md, which `g35 config reference` makes from here.
"""

# One idea in one file: the sections of the file, and the page that lists their keys.

import inspect
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, field_validator, model_validator

from agent.config.document_problems import (
    AbsolutePath,
    HostAddress,
    Section,
    bare_address,
    checked,
    name_of_letters,
    parse_address,
    toml_in,
    want_once,
)
from agent.config.listen_address import parse_listen_address
from agent.config.local_section import LocalSection
from agent.config.query_section import QuerySection
from agent.config.s3_section import S3Section
from agent.config.spill_section import SpillSection
from agent.errors import ConfigError, expected_there
from agent.host_os.cpu_idle import StayAwake
from agent.inline.cipher_suites import UNIT_BYTES_MAX
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.format.sealed_slot import UNIT_BYTES_MIN
from agent.pool.map.document import (
    VALUE_BYTES_MAX,
    VALUE_BYTES_MIN,
    Layout,
    SuiteName,
    VolumeWish,
    check_shares,
)
from agent.pool.map.names import TenantName, VolumeName
from agent.pool.prestage.readahead import DEPTH
from agent.pool.volume.settings import Timing
from agent.sizes import Size as Size
from agent.sizes import parse_size as parse_size
from agent.sizes import typed_size
from nvmeof.transport.base import VerbsChoice

FILES_UNIT_BYTES = 256 << 10
PATHS_MAX = 7
"""Paths to one enclosure beside the first; each takes a session, and a queue for each worker."""
PROCESSES_MAX = 64
PROCESSES_BY_CORES = 4
"""The most where `processes` is 0."""
CORES_OF_PROCESS = 4
SOCKET_PATH_BYTES_MAX = 107
"""sun_path of unix(7), without its zero byte."""


class AgentSection(Section):
    """What this agent is and where it serves."""

    mount: AbsolutePath | None = Field(
        None,
        description="Folder to mount the pool at; made if it is missing. May be left out where "
        "`[[virtiofs]]` or `[s3]` says how the pool is reached.",
    )
    state: AbsolutePath = Field(
        description="Folder for the agent's own files: its host identity, names of /fs and of S3 objects."
    )
    key_file: AbsolutePath = Field(description="The root key, mode 0600, made by `g35 key new`.")
    door: Literal["fuse", "pyfuse3"] = Field(
        "fuse",
        description="How the mount is served: `fuse`, our own FUSE protocol on clones of /dev/fuse; "
        "`pyfuse3`, the reference, by that package.",
    )
    workers: int = Field(
        0,
        ge=0,
        le=64,
        description="Threads of each process that serve requests, each one to its end. 0: one for each "
        "core, at least 2.",
    )
    processes: int = Field(
        0,
        ge=0,
        le=PROCESSES_MAX,
        description="Processes of this agent, each with `workers` threads. The first does everything; the "
        "others serve gets of clients on this machine and write the bytes of their puts "
        "(docs/processes.md). 0: one for each four cores, at most four, and one alone where the others "
        "could not serve.",
    )
    read_deadline_ms: float = Field(
        50.0, gt=0, le=60_000, description="A get of /kv that takes longer is a miss (`late`)."
    )
    write_deadline_ms: float = Field(
        5_000.0, gt=0, le=600_000, description="A put, or a write of a block, that takes longer has failed."
    )
    directory_fresh_ms: float = Field(
        0.0,
        ge=0,
        description="For how long the agent believes a remembered directory that a key is absent, what a "
        "name under /shared leads to, or that a chunk of its file is there. 0: never, so that it sees at "
        "once what other agents have stored. With a single agent on the pool a longer time saves a round "
        "trip for each miss and each put.",
    )
    directory_cache: Size = Field(
        64 << 20,
        ge=1 << 20,
        description="Memory for remembered directories, for all processes together; the directory of 64 "
        "slots takes 5 KiB.",
    )
    registered_memory: Size = Field(
        64 << 30,
        ge=0,
        description="Memory of clients that the agent may map (docs/operating.md#registered-memory); 0: "
        "none.",
    )
    allow_other: bool = Field(True, description="Whether users other than the agent's may enter the mount.")
    cpus: tuple[Annotated[int, Field(ge=0, le=1_048_575)], ...] = Field(
        (), description="Numbers of the processors that the agent runs on; empty: all that it may use."
    )
    stay_awake: StayAwake = Field(
        "auto",
        description="When to keep processors from sleeping (/dev/cpu_dma_latency, which takes root). "
        "`short`: while 100 requests a second come, for values of up to 128 KiB; `auto`: for values of any "
        "size where no two processors share a core, else as `short`; `always`: while any requests come; "
        "`never`. It costs power, and slows threads that share a core.",
    )
    tenants: tuple[TenantName, ...] = Field(
        (),
        description="The mount shows only the volumes of these tenants, and /fs only where all volumes of "
        "kind `files` are theirs; empty: all volumes.",
    )
    metrics: str = Field(
        "",
        description="Loopback address and port for Prometheus metrics, such as 127.0.0.1:9035; empty: none.",
    )

    @field_validator("metrics")
    @classmethod
    def _is_on_loopback(cls, address: str) -> str:
        try:
            parse_listen_address(address or "127.0.0.1:1")
        except ConfigError as error:
            raise ValueError(f"{error}; {error.advice}") from None
        return address

    @property
    def worker_count(self) -> int:
        """`workers`, with 0 resolved: more threads than cores only wait for each other's interpreter lock."""
        return self.workers or min(64, max(2, self._cores))

    @property
    def process_count(self) -> int:
        """`processes`, with 0 resolved: clients and the kernel's part of each get need cores, too."""
        return self.processes or max(1, min(PROCESSES_BY_CORES, self._cores // CORES_OF_PROCESS))

    @property
    def lends_single_slots(self) -> bool:
        """Whether readers write values that are put one by one. That takes 1.7 times the processor time of a
        put that the first process does whole, so there have to be cores for several processes."""
        return self._cores >= 2 * CORES_OF_PROCESS

    @property
    def _cores(self) -> int:
        return len(self.cpus) or len(os.sched_getaffinity(0))

    @property
    def timing(self) -> Timing:
        return Timing(
            self.read_deadline_ms / 1e3, self.write_deadline_ms / 1e3, self.directory_fresh_ms / 1e3
        )


def parse_path(text: str) -> tuple[str, int]:
    """See `parse_address`."""
    return parse_address(text, 1)


class EnclosureSection(Section):
    """One enclosure: where its NVMe-oF subsystem listens."""

    name: Annotated[str, name_of_letters(64)] = Field(description="Your name for it.")
    transport: Literal["tcp", "rdma"] = Field("tcp", description="The NVMe-oF transport.")
    address: HostAddress = Field(description="IP address or host name, without a port.")
    port: int = Field(4420, ge=1, le=65_535, description="TCP port, or RDMA service port.")
    paths: tuple[str, ...] = Field(
        (),
        max_length=PATHS_MAX,
        description="Further paths to the same subsystem, each `ADDRESS:PORT` (IPv6: `[ADDRESS]:PORT`), 7 "
        "at the most. Requests go on by another path when one fails (docs/multipath.md).",
    )
    nqn: str = Field(min_length=4, max_length=223, description="NQN of the subsystem.")
    header_digest: bool = Field(
        False,
        description="CRC-32C over PDU headers of I/O queues; TCP alone. The admin queue has digests wherever "
        "the enclosure grants them.",
    )
    data_digest: bool = Field(
        False,
        description="CRC-32C over PDU data of I/O queues; TCP alone. Sealed values are checked end to end "
        "without it.",
    )
    host_secret_file: AbsolutePath | None = Field(
        None,
        description="As in `[fabric]`, for this enclosure. Where it is set, both files of `[fabric]` do not "
        "count here.",
    )
    controller_secret_file: AbsolutePath | None = Field(
        None, description="As in `[fabric]`, for this enclosure."
    )

    @field_validator("paths")
    @classmethod
    def _are_addresses(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            parse_path(path)
        return paths

    @model_validator(mode="after")
    def _are_several(self) -> "EnclosureSection":
        ways = [(self.address, self.port), *map(parse_path, self.paths)]
        want_once(ways, "an address and port is named twice: that is one path, and no other to go by")
        return self

    def each_path(self) -> "list[EnclosureSection]":
        """This section once for each path, the first under its own name, the others as `NAME#2` and so on."""
        sections = [self.model_copy(update={"paths": ()})]
        for number, path in enumerate(self.paths, start=2):
            address, port = parse_path(path)
            changed = {"name": f"{self.name}#{number}", "address": address, "port": port, "paths": ()}
            sections.append(self.model_copy(update=changed))
        return sections


class DiscoverySection(Section):
    """A discovery controller that names enclosures (docs/operating.md). The agent stays connected to it,
    connects to the enclosures that it lists, and follows when the list changes."""

    name: Annotated[str, name_of_letters(54)] = Field(
        description="Your name for it; names of the enclosures that it lists begin with it."
    )
    transport: Literal["tcp", "rdma"] = Field(
        "tcp", description="The transport to the discovery controller itself; its list names others."
    )
    address: HostAddress = Field(description="IP address or host name, without a port.")
    port: int = Field(8009, ge=1, le=65_535, description="TCP port, or RDMA service port.")
    header_digest: bool = Field(False, description="As in `[[enclosures]]`, for it and what it lists.")
    data_digest: bool = Field(False, description="As in `[[enclosures]]`, for it and what it lists.")
    host_secret_file: AbsolutePath | None = Field(
        None, description="As in `[fabric]`, for it and for the enclosures that it lists."
    )
    controller_secret_file: AbsolutePath | None = Field(
        None, description="As in `[fabric]`; for the enclosures that it lists."
    )


class FabricSection(Section):
    """How enclosures are reached: those with `transport = "rdma"`, and those that want authentication."""

    verbs_provider: Literal["pyverbs", "emulator.roce.pyverbs"] = Field(
        "pyverbs",
        description="`pyverbs`: an RDMA device or rdma_rxe, by Debian's python3-pyverbs; "
        "`emulator.roce.pyverbs`: a soft-RoCE device inside the agent.",
    )
    local_address: str = Field(
        "",
        description="Address of the RDMA device to connect from; empty: the one that leads to the "
        "enclosure. An emulated device is made at this address, and listens at its UDP port 4791; empty: a "
        "free address on loopback.",
    )
    host_secret_file: AbsolutePath | None = Field(
        None,
        description="The agent's DH-HMAC-CHAP secret, a file of mode 0600 made by `g35 key make-dhchap`, for "
        "enclosures whose hosts have to authenticate. Read anew for every connection.",
    )
    controller_secret_file: AbsolutePath | None = Field(
        None,
        description="The enclosures' own secret, another such file. With it the agent connects to no "
        "enclosure that cannot prove itself. It wants `host_secret_file`.",
    )

    @field_validator("local_address")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        return bare_address(address) if address else address

    @property
    def choice(self) -> VerbsChoice:
        return VerbsChoice(self.verbs_provider, self.local_address)


class VolumeSection(Section):
    """A volume that `g35 pool format` or `g35 tenant add` makes. Later changes here do not change it."""

    name: VolumeName = Field(
        description="Name under /kv or /shared, or among the volumes behind /fs: letters, digits, `.`, `_` "
        "and `-`."
    )
    kind: Literal["kv", "files", "shared"] = Field(
        "kv",
        description="`kv` serves /kv, `files` holds blocks of /fs. `shared` serves /shared; it becomes two "
        "volumes, one for chunks of files and one, of some 4 % of the room, for their names.",
    )
    value_size: Size = Field(
        1 << 20,
        ge=VALUE_BYTES_MIN,
        le=VALUE_BYTES_MAX,
        description="The largest value that a slot takes, 64K to 16M; with layout `kv` to 2M.",
    )
    unit_size: Size = Field(
        0,
        description="Bytes that are sealed at a time: 64K to 1M, a power of two. 0: for `kv` and `shared` "
        "the whole value up to 1M, for `files` at most 256K, because programs read ranges of files.",
    )
    suite: SuiteName = Field(
        "aes-256-gcm",
        description="How slots are sealed: `aes-256-gcm`, `aes-256-xts+crc64`, or `plain+crc64`, in clear.",
    )
    ttl_seconds: int = Field(0, ge=0, description="Values expire after this long; 0: never.")
    share: float = Field(
        gt=0, le=1, description="Its part of the pool's bytes; parts of volumes in sets add up to 1 at most."
    )
    tenant: TenantName = Field(
        "default", description="Whose volume it is; tenants have keys of their own (docs/tenants.md)."
    )
    layout: Layout = Field(
        "auto",
        description="`sets`: in slots on namespaces of logical blocks. `kv`: on the namespaces of the KV "
        "command set, which one volume has whole. `auto`: `sets` where there are namespaces of blocks, else "
        "`kv`.",
    )
    copies: Literal[1, 2] = Field(
        1,
        description="2: each value has a second copy in another namespace, and a get asks both where one is "
        "slow. For `kv` volumes in sets. The volume then holds half as much.",
    )
    marks: Literal[64, 340] = Field(
        64,
        description="How many values in G4 a set of 64 slots remembers (docs/tiers.md). 340 takes 4 KiB more "
        "for each set. For `kv` volumes in sets, of one copy.",
    )

    local_first: bool = Field(
        False,
        description="With `copies = 2`: the first copy lies on a server's own SSD (`[[local]]`), the second "
        "in an enclosure. Reads on that server need no fabric.",
    )

    @model_validator(mode="after")
    def _can_be_laid_out(self) -> "VolumeSection":
        try:
            self.wish()
        except ValidationError as error:
            found = error.errors()[0]
            key = "".join(str(part) for part in found["loc"]).replace("_bytes", "_size")
            raise ValueError(f"{key} {expected_there(found)}".lstrip()) from None
        return self

    def _fitting_unit(self) -> int:
        most = FILES_UNIT_BYTES if self.kind == "files" else UNIT_BYTES_MAX
        return max(UNIT_BYTES_MIN, min(most, 1 << (self.value_size - 1).bit_length()))

    def wish(self) -> VolumeWish:
        same = {"name", "kind", "suite", "ttl_seconds", "share", "tenant", "layout", "copies", "local_first"}
        unit_bytes = self.unit_size or self._fitting_unit()
        return VolumeWish(
            value_bytes=self.value_size,
            unit_bytes=unit_bytes,
            mark_blocks=1 if self.marks > SLOTS_PER_SET else 0,
            **self.model_dump(include=same),
        )


class FilesSection(Section):
    """Files under /fs, which is there when the pool has a volume of kind `files`."""

    staging: Size = Field(256 << 20, ge=16 << 20, description="Memory for files being written.")
    on_full: Literal["enospc", "evict"] = Field(
        "enospc",
        description="When there is no room: `enospc` refuses; `evict` removes whole files, the least "
        "recently used first.",
    )


class VirtioFsSection(Section):
    """A device for a guest: the socket at which QEMU's `vhost-user-fs-pci` finds it (docs/virtiofs.md). One
    table for each guest; a single one may be written `[virtiofs]`. The tag is given to QEMU."""

    socket: Path = Field(description="Path of the Unix socket to listen at; mode 0600.")
    queues: int = Field(
        0,
        ge=0,
        le=64,
        description="Request queues, a thread each: the most that QEMU's `num-request-queues` may ask for. "
        "0: as many as `agent.workers`.",
    )
    subtree: str = Field(
        "/",
        max_length=1024,
        description="The folder of /fs that the guest sees as its /fs; made if missing. Empty: no /fs.",
    )
    volumes: tuple[str, ...] = Field(
        (), description="The key-value and shared volumes that the guest sees; empty: all of them."
    )
    tenants: tuple[TenantName, ...] = Field(
        (),
        description="The device shows only the volumes of these tenants, and /fs only where all volumes of "
        "kind `files` are theirs; empty: all volumes.",
    )
    sealed_memory: bool = Field(
        True,
        description="Refuse guest memory that could shrink or run out of pages, which would kill the agent. "
        "`true` takes QEMU's memory-backend-memfd alone; `false` also memory-backend-file on tmpfs or "
        "hugetlbfs, and hugetlb=on.",
    )

    @field_validator("socket")
    @classmethod
    def _can_be_listened_at(cls, path: Path) -> Path:
        if not path.is_absolute():
            raise ValueError("a socket wants an absolute path, /run/g35/gpu0.sock for example")
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise ValueError(f"a socket's path has {SOCKET_PATH_BYTES_MAX} bytes at the most")
        return path

    @field_validator("subtree")
    @classmethod
    def _stays_within(cls, path: str) -> str:
        if {".", ".."} & set(path.split("/")):
            raise ValueError("a folder of /fs is named without . and ..")
        return path

    def queue_count(self, workers: int) -> int:
        """`queues`, with 0 resolved."""
        return self.queues or workers


class PrestageSection(Section):
    """What waits in the agent's memory before it is asked for (docs/prestaging.md)."""

    memory: Size = Field(
        256 << 20, ge=0, description="Memory for values that were prestaged; 0 turns prestaging off."
    )
    waits: Literal["sealed", "open"] = Field(
        "sealed",
        description="How announced values wait: `sealed`, as on flash, or `open`, in clear. `open` saves "
        "deciphering at the get, and leaves values readable in the agent's memory for up to 65 s.",
    )
    learn: bool = Field(
        False,
        description="Read ahead what is likely to follow a prefix, learned from what followed it before. "
        "Takes half of `memory` at the most.",
    )
    depth: int = Field(
        DEPTH, ge=1, le=64, description="With `learn`: values that are read ahead of the one being read."
    )
    learn_rate: Size = Field(
        1 << 30, ge=0, description="With `learn`: bytes a second at the most for reading ahead; 0: no bound."
    )


class PolicySection(Section):
    """How this agent serves one key-value volume, where the defaults do not fit (docs/prestaging.md)."""

    volume: VolumeName = Field(description="The volume; one table for each.")
    write: Literal["through", "back", "second-use"] = Field(
        "through",
        description="When a put is acknowledged. `through`: when it is on flash. `back`: when it is in this "
        "agent's memory; an agent that dies loses what it has yet to store. `second-use`: as `through`, but "
        "where a live value would have to go, a key that was not put before is acknowledged and not stored; "
        "not for a shared volume.",
    )
    write_back_memory: Size = Field(
        64 << 20,
        ge=1 << 20,
        description="Memory for values that `back` has yet to store. A put without room there goes "
        "`through`.",
    )
    prefill_tokens_per_s: float = Field(
        0.0,
        ge=0,
        description="Tokens a second that the engine computes. With `bytes_per_token` a get that would take "
        "longer than computing its value is a miss (`late`) at once. 0: off.",
    )
    bytes_per_token: Size = Field(0, ge=0, description="Bytes of a token in the values of this volume.")

    @model_validator(mode="after")
    def _gate_is_whole(self) -> "PolicySection":
        if (self.prefill_tokens_per_s > 0) != (self.bytes_per_token > 0):
            raise ValueError("prefill_tokens_per_s and bytes_per_token go together")
        return self


class PoolSection(Section):
    """Choices that concern the pool as a whole."""

    membership: Literal["manual", "auto"] = Field(
        "manual",
        description="Who adds blank namespaces to the pool: `manual`: you, by `g35 pool add`; `auto`: this "
        "agent while it serves, which also settles the pool where `rebalance` is set.",
    )
    join_after_s: float = Field(
        30.0,
        ge=0.5,
        le=86_400,
        description="With `auto`: new namespaces join, all at once, when for this long none has come or "
        "gone.",
    )
    rebalance: Size = Field(
        0,
        ge=0,
        description="Bytes a second at the most that this agent moves to namespaces that joined the pool. "
        "0: it moves nothing. Where a pool holds files, set it on the agent that serves them.",
    )
    allow_plain: bool = Field(
        False, description="Allow volumes of suite `plain+crc64`, which stores values in clear."
    )


class ScrubSection(Section):
    """Reading all stored values, to find bad ones before somebody asks for them (docs/operating.md). Every
    agent with this section reads the whole pool, so set it on one agent."""

    bandwidth: Size = Field(
        0,
        ge=0,
        description="Bytes a second at the most, and an eighth of that while the agent's workers read or "
        "write; 0: no scrub.",
    )
    every_hours: float = Field(
        24.0,
        gt=0,
        le=24 * 365,
        description="Hours from the end of one pass to the next; the first begins with the agent.",
    )


def _as_list(value: object) -> object:
    """A table that may be repeated, written once."""
    return [value] if isinstance(value, dict) else value


class Configuration(Section):
    """The whole file."""

    agent: AgentSection
    enclosures: tuple[EnclosureSection, ...] = Field((), max_length=4096)
    discovery: Annotated[tuple[DiscoverySection, ...], BeforeValidator(_as_list)] = Field((), max_length=64)
    local: Annotated[tuple[LocalSection, ...], BeforeValidator(_as_list)] = Field((), max_length=64)
    fabric: FabricSection = Field(default_factory=lambda: FabricSection.model_validate({}))
    volumes: tuple[VolumeSection, ...] = Field((), max_length=64)
    files: FilesSection = Field(default_factory=lambda: FilesSection.model_validate({}))
    prestage: PrestageSection = Field(default_factory=lambda: PrestageSection.model_validate({}))
    policies: tuple[PolicySection, ...] = Field((), max_length=64)
    pool: PoolSection = Field(default_factory=lambda: PoolSection.model_validate({}))
    scrub: ScrubSection = Field(default_factory=lambda: ScrubSection.model_validate({}))
    spill: Annotated[tuple[SpillSection, ...], BeforeValidator(_as_list)] = Field((), max_length=16)
    virtiofs: Annotated[tuple[VirtioFsSection, ...], BeforeValidator(_as_list)] = Field((), max_length=64)
    s3: S3Section = Field(default_factory=lambda: S3Section.model_validate({}))
    query: QuerySection = Field(default_factory=lambda: QuerySection.model_validate({}))

    @model_validator(mode="after")
    def _holds_together(self) -> "Configuration":
        if not self.enclosures and not self.discovery and not self.local:
            raise ValueError(
                "neither an enclosure nor a discovery controller nor a local namespace says where the pool is"
            )
        want_once((each.name for each in self.discovery), "two discovery controllers have one name")
        sections: list[FabricSection | EnclosureSection | DiscoverySection] = [self.fabric]
        sections += [*self.enclosures, *self.discovery]
        for section in sections:
            if section.controller_secret_file is not None and section.host_secret_file is None:
                raise ValueError("controller_secret_file wants a host_secret_file beside it")
        if self.agent.mount is None and not self.virtiofs and not self.s3.listen:
            raise ValueError("no agent.mount, virtiofs.socket or s3.listen says how the pool is reached")
        # However they are spelled: two slashes at the beginning are kept by realpath, and mean one.
        sockets = ["/" + os.path.realpath(device.socket).lstrip("/") for device in self.virtiofs]
        want_once(sockets, "two guests have one virtiofs.socket")
        want_once((each.volume for each in self.policies), "two policies are for one volume")
        spilled = [name for place in self.spill for name in place.volumes or ("",)]
        want_once(spilled, "two places of spill are for one volume")
        shared = {each.name for each in self.volumes if each.kind == "shared"}
        for policy in self.policies:
            if policy.write == "second-use" and policy.volume in shared:
                raise ValueError(
                    f"policies: {policy.volume} is a shared volume, which would lose files by second-use: "
                    "their chunks are stored once; leave out `write`"
                )
        names = [each.name for each in self.enclosures] + [each.shown_name for each in self.local]
        want_once(names, "two enclosures, local namespaces among them, have one name")
        paths = [path for enclosure in self.enclosures for path in enclosure.each_path()]
        want_once(
            ((each.transport, each.address, each.port, each.nqn) for each in paths),
            "two enclosures have one address, port and NQN: that is one path",
        )
        want_once((each.name for each in self.volumes), "two volumes have one name")
        check_shares(each.share for each in self.volumes if each.layout != "kv")
        for volume in self.volumes:
            if volume.suite == "plain+crc64" and not self.pool.allow_plain:
                raise ValueError(
                    f"volume {volume.name} asks for plain+crc64, which stores values in the clear; "
                    "pool.allow_plain must say so too"
                )
        return self


def parse_configuration(document: dict[str, Any], where: str) -> Configuration:
    """A checked configuration. Raises ConfigError that names every key that is wrong."""
    refusal = f"{where} is not a usable configuration"
    return checked(document, Configuration, refusal, "docs/reference/configuration.md lists every key")


def load_configuration(path: Path) -> Configuration:
    """The configuration in a file. Raises ConfigError where it cannot be read or is wrong."""
    return parse_configuration(toml_in(path), str(path))


def host_identity(state: Path) -> tuple[str, bytes]:
    """This agent's host NQN and 16-byte host id, made once and kept in the state folder."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = state / "host_id"
    try:
        host_id = uuid.UUID(file.read_text().strip())
    except FileNotFoundError:
        host_id = uuid.uuid4()
        file.write_text(f"{host_id}\n")
    except ValueError:
        raise ConfigError(f"{file} holds no UUID", "remove it; a new one is made") from None
    return f"nqn.2014-08.org.nvmexpress:uuid:{host_id}", host_id.bytes


def reference_markdown() -> str:
    """The page: a table for each section."""
    lines = [
        "# Configuration",
        "",
        "One TOML file, given to `g35 agent --config FILE`. Sizes take K, M, G or T (powers of 1,024).",
        "Paths are absolute.",
        "Unknown keys are refused. This page is made by `g35 config reference`.",
    ]
    for header, section in _sections(Configuration):
        lines += ["", f"## `{header}`", "", inspect.cleandoc(section.__doc__ or ""), ""]
        lines += ["| key | default | what it is |", "| --- | --- | --- |"]
        for key, info in section.model_fields.items():
            default = "required" if info.is_required() else f"`{_shown(info.default)}`"
            lines.append(f"| `{key}` | {default} | {info.description} |")
    return "\n".join(lines) + "\n"


def _sections(model: type[BaseModel], before: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Each table with its header, `[[NAME]]` where there is one for each of something."""
    for key, info in model.model_fields.items():
        several = get_args(info.annotation)
        section: Any = several[0] if several else info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield f"[[{before}{key}]]" if several else f"[{before}{key}]", section
            yield from _sections(section, f"{before}{key}.")


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 1 << 10 and value % (1 << 10) == 0:
        return f'"{typed_size(value)}"'
    return f'"{value}"' if isinstance(value, str) else str(value)
