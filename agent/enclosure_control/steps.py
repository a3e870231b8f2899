"""The changes that make an enclosure what its description says. No I/O.

A step says what changes: `str(step)` for people, `step.call()` as the call of SPDK's JSON-RPC that carries it
out. `configfs_target.py` has the writes for nvmet. Fields have the names and the order of SPDK's parameters
where those are plain values. No step carries a secret.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, NamedTuple, dataclass_transform

from agent.enclosure_control.records import Address, Host, Namespace
from agent.sizes import size_text

MIB: Final = 1 << 20
_DELETIONS: Final = {
    "malloc": "bdev_malloc_delete", "null": "bdev_null_delete", "aio": "bdev_aio_delete",
    "nvme": "bdev_nvme_detach_controller",
}  # fmt: skip


class RpcCall(NamedTuple):
    """A method and its parameters."""

    method: str
    params: dict[str, Any]


@dataclass_transform(frozen_default=True)
class Step:
    """One change. `TEXT` is a format string over the step. Every step is a frozen dataclass."""

    METHOD: ClassVar[str]
    TEXT: ClassVar[str]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    def __str__(self) -> str:
        return self.TEXT.format(self)

    def call(self) -> RpcCall:
        return RpcCall(self.METHOD, _given(self.params()))

    def params(self) -> dict[str, Any]:
        """The parameters; None leaves one out."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]


def _given(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


class CreateTransport(Step):
    """Make a transport; `options` are SPDK's, by name."""

    METHOD = "nvmf_create_transport"
    TEXT = "create transport {0.trtype}"
    trtype: str
    options: tuple[tuple[str, int], ...]

    def params(self) -> dict[str, Any]:
        return {"trtype": self.trtype, **dict(self.options)}


class AddKey(Step):
    METHOD = "keyring_file_add_key"
    TEXT = "add key {0.name} from {0.path}"
    name: str
    path: str


class RemoveKey(Step):
    """Forget a key; hosts that use it keep what they have."""

    METHOD = "keyring_file_remove_key"
    TEXT = "remove key {0.name}"
    name: str


class CreateMemory(Step):
    """Make a bdev of memory; `kind` is malloc, or null: it forgets what is written and reads as zeros."""

    TEXT = "create {0.kind} bdev {0.name} of {0.size}"
    kind: str
    name: str
    block_size: int
    num_blocks: int
    uuid: str | None

    @property
    def size(self) -> str:
        return size_text(self.block_size * self.num_blocks)

    def call(self) -> RpcCall:
        params = self.params()
        return RpcCall(f"bdev_{params.pop('kind')}_create", _given(params))


class CreateAio(Step):
    METHOD = "bdev_aio_create"
    TEXT = "create aio bdev {0.name} on {0.filename}"
    name: str
    filename: str
    block_size: int


class AttachNvme(Step):
    METHOD = "bdev_nvme_attach_controller"
    TEXT = "attach NVMe controller {0.name} at {0.place}"
    name: str
    place: Address
    subnqn: str | None
    hostnqn: str | None
    key: str | None
    controller_key: str | None

    def params(self) -> dict[str, Any]:
        place = self.place.params()
        if self.place.trtype == "PCIE":
            place = {name: place[name] for name in ("trtype", "traddr")}
        keys = {"dhchap_key": self.key, "dhchap_ctrlr_key": self.controller_key}
        return {"name": self.name, **place, "subnqn": self.subnqn, "hostnqn": self.hostnqn, **keys}


class DeleteBdev(Step):
    """Take a bdev away; `kind` is malloc, null, aio or nvme (the controller with all its bdevs)."""

    TEXT = "delete {0.kind} bdev {0.name}"
    kind: str
    name: str

    def call(self) -> RpcCall:
        return RpcCall(_DELETIONS[self.kind], {"name": self.name})


class WaitForExamine(Step):
    """Let the enclosure look for what new bdevs carry. A new plan follows."""

    METHOD = "bdev_wait_for_examine"
    TEXT = "wait until the new bdevs are examined"


class CreateLvolStore(Step):
    """Make a store of logical volumes; the contents of the bdev are lost."""

    METHOD = "bdev_lvol_create_lvstore"
    TEXT = "create lvol store {0.name} on {0.bdev}"
    name: str
    bdev: str
    cluster_size: int | None

    def params(self) -> dict[str, Any]:
        return {"bdev_name": self.bdev, "lvs_name": self.name, "cluster_sz": self.cluster_size}


class CreateLvol(Step):
    METHOD = "bdev_lvol_create"
    TEXT = "create lvol {0.store}/{0.name} of {0.size}"
    store: str
    name: str
    size_in_mib: int
    thin: bool

    @property
    def size(self) -> str:
        return size_text(self.size_in_mib * MIB)

    def params(self) -> dict[str, Any]:
        thin = {"thin_provision": self.thin or None}
        return {"lvol_name": self.name, "size_in_mib": self.size_in_mib, **thin, "lvs_name": self.store}


class ResizeLvol(Step):
    METHOD = "bdev_lvol_resize"
    TEXT = "resize lvol {0.name} to {0.size}"
    name: str
    size_in_mib: int

    @property
    def size(self) -> str:
        return size_text(self.size_in_mib * MIB)


class CreateSubsystem(Step):
    METHOD = "nvmf_create_subsystem"
    TEXT = "create subsystem {0.nqn}"
    nqn: str
    serial_number: str | None
    model_number: str | None
    max_namespaces: int | None
    allow_any_host: bool
    ana_reporting: bool | None = None


class DeleteSubsystem(Step):
    """Take a subsystem away with all that is in it; bdevs stay."""

    METHOD = "nvmf_delete_subsystem"
    TEXT = "delete subsystem {0.nqn}"
    nqn: str


class SetAllowAnyHost(Step):
    METHOD = "nvmf_subsystem_allow_any_host"
    nqn: str
    allow_any_host: bool

    def __str__(self) -> str:
        return f"{self.nqn}: {'let any host in' if self.allow_any_host else 'let in named hosts alone'}"


class AddNamespace(Step):
    METHOD = "nvmf_subsystem_add_ns"
    TEXT = "{0.nqn}: add namespace {0.namespace.nsid} on {0.namespace.bdev}"
    nqn: str
    namespace: Namespace

    def params(self) -> dict[str, Any]:
        new = self.namespace
        names = {"nguid": new.nguid.upper() or None, "uuid": new.uuid or None}
        return {"nqn": self.nqn, "namespace": {"nsid": new.nsid, "bdev_name": new.bdev, **_given(names)}}


class RemoveNamespace(Step):
    """Offer it no more; the bdev and its contents stay."""

    METHOD = "nvmf_subsystem_remove_ns"
    TEXT = "{0.nqn}: remove namespace {0.nsid}"
    nqn: str
    nsid: int


class _OfListener(Step):
    nqn: str
    place: Address

    def params(self) -> dict[str, Any]:
        return {"nqn": self.nqn, "listen_address": self.place.params()}


class AddListener(_OfListener):
    METHOD = "nvmf_subsystem_add_listener"
    TEXT = "{0.nqn}: listen at {0.place}"


class RemoveListener(_OfListener):
    METHOD = "nvmf_subsystem_remove_listener"
    TEXT = "{0.nqn}: do not listen at {0.place}"


class _OfHost(Step):
    nqn: str
    host: Host

    def params(self) -> dict[str, Any]:
        keys = {"dhchap_key": self.host.key, "dhchap_ctrlr_key": self.host.controller_key}
        return {"nqn": self.nqn, "host": self.host.nqn, **keys}


class SetKeys(_OfHost):
    """Give other keys to a host that may connect; its connections stay."""

    METHOD = "nvmf_subsystem_set_keys"
    TEXT = "{0.nqn}: set the keys of host {0.host.nqn}"


class AddHost(_OfHost):
    METHOD = "nvmf_subsystem_add_host"

    def __str__(self) -> str:
        return f"{self.nqn}: allow host {self.host.nqn}" + (" with a key" if self.host.key else "")


class RemoveHost(Step):
    METHOD = "nvmf_subsystem_remove_host"
    TEXT = "{0.nqn}: remove host {0.host}"
    nqn: str
    host: str
