"""The changes that make an enclosure what its description says. No I/O.

A step says what is to change, not how: `rpc_calls.py` makes one call of SPDK's RPC of it,
`configfs_target.py` some writes below /sys/kernel/config/nvmet. `str(step)` is for people. No step carries
a secret.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from agent.enclosure_control.records import Address, Host, Namespace


@dataclass(frozen=True, slots=True)
class CreateTransport:
    """Make a transport; `options` are SPDK's, by name."""

    trtype: str
    options: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"create transport {self.trtype}"


@dataclass(frozen=True, slots=True)
class AddKey:
    """Register a key file under a name."""

    name: str
    path: str

    def __str__(self) -> str:
        return f"add key {self.name} from {self.path}"


@dataclass(frozen=True, slots=True)
class RemoveKey:
    """Forget a key; hosts that use it keep what they have."""

    name: str

    def __str__(self) -> str:
        return f"remove key {self.name}"


@dataclass(frozen=True, slots=True)
class CreateMalloc:
    """Make memory into a bdev."""

    name: str
    block_size: int
    block_count: int
    uuid: str | None

    def __str__(self) -> str:
        return f"create malloc bdev {self.name} of {self.block_size * self.block_count} bytes"


@dataclass(frozen=True, slots=True)
class CreateNull:
    """Make a bdev that forgets what is written and reads as zeros."""

    name: str
    block_size: int
    block_count: int
    uuid: str | None

    def __str__(self) -> str:
        return f"create null bdev {self.name} of {self.block_size * self.block_count} bytes"


@dataclass(frozen=True, slots=True)
class CreateAio:
    """Make a file into a bdev."""

    name: str
    filename: str
    block_size: int

    def __str__(self) -> str:
        return f"create aio bdev {self.name} on {self.filename}"


@dataclass(frozen=True, slots=True)
class AttachNvme:
    """Become a host of an NVMe controller."""

    name: str
    place: Address
    subnqn: str | None
    hostnqn: str | None
    key: str | None
    controller_key: str | None

    def __str__(self) -> str:
        return f"attach NVMe controller {self.name} at {self.place}"


@dataclass(frozen=True, slots=True)
class DeleteBdev:
    """Take a bdev away; `kind` is malloc, null, aio or nvme (the controller with all its bdevs)."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"delete {self.kind} bdev {self.name}"


@dataclass(frozen=True, slots=True)
class WaitForExamine:
    """Let the enclosure look what new bdevs carry. What follows is planned anew after it."""

    def __str__(self) -> str:
        return "wait until the new bdevs are examined"


@dataclass(frozen=True, slots=True)
class CreateLvolStore:
    """Make a store of logical volumes; what the bdev carries is lost."""

    name: str
    bdev: str
    cluster_size: int | None

    def __str__(self) -> str:
        return f"create lvol store {self.name} on {self.bdev}"


@dataclass(frozen=True, slots=True)
class CreateLvol:
    """Make a logical volume."""

    store: str
    name: str
    size_in_mib: int
    thin: bool

    def __str__(self) -> str:
        return f"create lvol {self.store}/{self.name} of {self.size_in_mib} MiB"


@dataclass(frozen=True, slots=True)
class ResizeLvol:
    """Let a logical volume grow."""

    alias: str
    size_in_mib: int

    def __str__(self) -> str:
        return f"resize lvol {self.alias} to {self.size_in_mib} MiB"


@dataclass(frozen=True, slots=True)
class CreateSubsystem:
    """Make a subsystem, without namespaces, listeners and hosts."""

    nqn: str
    serial: str | None
    model: str | None
    max_namespaces: int | None
    allow_any_host: bool
    ana_reporting: bool | None = None

    def __str__(self) -> str:
        return f"create subsystem {self.nqn}"


@dataclass(frozen=True, slots=True)
class DeleteSubsystem:
    """Take a subsystem away with all that is in it; bdevs stay."""

    nqn: str

    def __str__(self) -> str:
        return f"delete subsystem {self.nqn}"


@dataclass(frozen=True, slots=True)
class SetAllowAnyHost:
    """Let every host in, or those alone that are named."""

    nqn: str
    allow: bool

    def __str__(self) -> str:
        return f"{self.nqn}: {'let any host in' if self.allow else 'let in named hosts alone'}"


@dataclass(frozen=True, slots=True)
class AddNamespace:
    """Offer a bdev as a namespace."""

    nqn: str
    namespace: Namespace

    def __str__(self) -> str:
        return f"{self.nqn}: add namespace {self.namespace.nsid} on {self.namespace.bdev}"


@dataclass(frozen=True, slots=True)
class RemoveNamespace:
    """Offer it no more; the bdev and its contents stay."""

    nqn: str
    nsid: int

    def __str__(self) -> str:
        return f"{self.nqn}: remove namespace {self.nsid}"


@dataclass(frozen=True, slots=True)
class AddListener:
    """Listen at one more address."""

    nqn: str
    place: Address

    def __str__(self) -> str:
        return f"{self.nqn}: listen at {self.place}"


@dataclass(frozen=True, slots=True)
class RemoveListener:
    """Listen there no more."""

    nqn: str
    place: Address

    def __str__(self) -> str:
        return f"{self.nqn}: do not listen at {self.place}"


@dataclass(frozen=True, slots=True)
class AddHost:
    """Let a host in."""

    nqn: str
    host: Host

    def __str__(self) -> str:
        return f"{self.nqn}: allow host {self.host.nqn}" + (" with a key" if self.host.key else "")


@dataclass(frozen=True, slots=True)
class RemoveHost:
    """Let a host in no more."""

    nqn: str
    host_nqn: str

    def __str__(self) -> str:
        return f"{self.nqn}: remove host {self.host_nqn}"


@dataclass(frozen=True, slots=True)
class SetKeys:
    """Give a host that may connect other keys; connections that stand, stand."""

    nqn: str
    host: Host

    def __str__(self) -> str:
        return f"{self.nqn}: set the keys of host {self.host.nqn}"


Step: TypeAlias = (
    CreateTransport
    | AddKey
    | RemoveKey
    | CreateMalloc
    | CreateNull
    | CreateAio
    | AttachNvme
    | DeleteBdev
    | WaitForExamine
    | CreateLvolStore
    | CreateLvol
    | ResizeLvol
    | CreateSubsystem
    | DeleteSubsystem
    | SetAllowAnyHost
    | AddNamespace
    | RemoveNamespace
    | AddListener
    | RemoveListener
    | AddHost
    | RemoveHost
    | SetKeys
)
