"""A step as one call of SPDK's JSON-RPC: the method and its parameters. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent.enclosure_control.records import Address, Host
from agent.enclosure_control.steps import (
    AddHost,
    AddKey,
    AddListener,
    AddNamespace,
    AttachNvme,
    CreateAio,
    CreateLvol,
    CreateLvolStore,
    CreateMalloc,
    CreateNull,
    CreateSubsystem,
    CreateTransport,
    DeleteBdev,
    DeleteSubsystem,
    RemoveHost,
    RemoveKey,
    RemoveListener,
    RemoveNamespace,
    ResizeLvol,
    SetAllowAnyHost,
    SetKeys,
    Step,
    WaitForExamine,
)

_DELETIONS = {
    "malloc": "bdev_malloc_delete", "null": "bdev_null_delete", "aio": "bdev_aio_delete",
    "nvme": "bdev_nvme_detach_controller",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RpcCall:
    """A method and its parameters; None among them is left out."""

    method: str
    given: dict[str, Any]

    @property
    def params(self) -> dict[str, Any]:
        return {name: value for name, value in self.given.items() if value is not None}


def call_of(step: Step) -> RpcCall:
    """The call that carries `step` out."""
    match step:
        case CreateTransport(trtype, options):
            return RpcCall("nvmf_create_transport", {"trtype": trtype, **dict(options)})
        case AddKey(name, path):
            return RpcCall("keyring_file_add_key", {"name": name, "path": path})
        case RemoveKey(name):
            return RpcCall("keyring_file_remove_key", {"name": name})
        case CreateMalloc(name, block_size, block_count, uuid) | CreateNull(
            name, block_size, block_count, uuid
        ):
            return RpcCall(
                "bdev_null_create" if isinstance(step, CreateNull) else "bdev_malloc_create",
                {"name": name, "block_size": block_size, "num_blocks": block_count, "uuid": uuid},
            )
        case CreateAio(name, filename, block_size):
            return RpcCall("bdev_aio_create", {"name": name, "filename": filename, "block_size": block_size})
        case DeleteBdev(kind, name):
            return RpcCall(_DELETIONS[kind], {"name": name})
        case WaitForExamine():
            return RpcCall("bdev_wait_for_examine", {})
        case CreateLvolStore(name, bdev, cluster_size):
            return RpcCall(
                "bdev_lvol_create_lvstore", {"bdev_name": bdev, "lvs_name": name, "cluster_sz": cluster_size}
            )
        case CreateLvol(store, name, size_in_mib, thin):
            return RpcCall(
                "bdev_lvol_create",
                {
                    "lvol_name": name,
                    "size_in_mib": size_in_mib,
                    "thin_provision": True if thin else None,
                    "lvs_name": store,
                },
            )
        case ResizeLvol(alias, size_in_mib):
            return RpcCall("bdev_lvol_resize", {"name": alias, "size_in_mib": size_in_mib})
        case AttachNvme():
            return _attachment(step)
        case _:
            return _subsystem_call(step)


def _attachment(step: AttachNvme) -> RpcCall:
    fabric = step.place.trtype != "PCIE"
    return RpcCall(
        "bdev_nvme_attach_controller",
        {
            "name": step.name,
            "trtype": step.place.trtype,
            "traddr": step.place.traddr,
            "adrfam": step.place.adrfam if fabric else None,
            "trsvcid": step.place.trsvcid if fabric else None,
            "subnqn": step.subnqn,
            "hostnqn": step.hostnqn,
            "dhchap_key": step.key,
            "dhchap_ctrlr_key": step.controller_key,
        },
    )


def _subsystem_call(step: Step) -> RpcCall:
    match step:
        case CreateSubsystem():
            return RpcCall(
                "nvmf_create_subsystem",
                {
                    "nqn": step.nqn,
                    "serial_number": step.serial,
                    "model_number": step.model,
                    "max_namespaces": step.max_namespaces,
                    "allow_any_host": step.allow_any_host,
                    "ana_reporting": step.ana_reporting,
                },
            )
        case DeleteSubsystem(nqn):
            return RpcCall("nvmf_delete_subsystem", {"nqn": nqn})
        case SetAllowAnyHost(nqn, allow):
            return RpcCall("nvmf_subsystem_allow_any_host", {"nqn": nqn, "allow_any_host": allow})
        case AddNamespace(nqn, namespace):
            members = {
                "nsid": namespace.nsid,
                "bdev_name": namespace.bdev,
                "nguid": namespace.nguid.upper() or None,
                "uuid": namespace.uuid or None,
            }
            return RpcCall(
                "nvmf_subsystem_add_ns",
                {"nqn": nqn, "namespace": {name: value for name, value in members.items() if value}},
            )
        case RemoveNamespace(nqn, nsid):
            return RpcCall("nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": nsid})
        case AddListener(nqn, place):
            return RpcCall("nvmf_subsystem_add_listener", {"nqn": nqn, "listen_address": _listen(place)})
        case RemoveListener(nqn, place):
            return RpcCall("nvmf_subsystem_remove_listener", {"nqn": nqn, "listen_address": _listen(place)})
        case AddHost(nqn, host):
            return RpcCall("nvmf_subsystem_add_host", _host(nqn, host))
        case SetKeys(nqn, host):
            return RpcCall("nvmf_subsystem_set_keys", _host(nqn, host))
        case RemoveHost(nqn, host_nqn):
            return RpcCall("nvmf_subsystem_remove_host", {"nqn": nqn, "host": host_nqn})
        case _:
            raise AssertionError(f"no call carries out {step!r}")


def _listen(place: Address) -> dict[str, str]:
    return {
        "trtype": place.trtype, "adrfam": place.adrfam, "traddr": place.traddr, "trsvcid": place.trsvcid,
    }  # fmt: skip


def _host(nqn: str, host: Host) -> dict[str, str | None]:
    return {
        "nqn": nqn, "host": host.nqn, "dhchap_key": host.key, "dhchap_ctrlr_key": host.controller_key,
    }  # fmt: skip
