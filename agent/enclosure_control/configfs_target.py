"""The kernel's nvmet as an enclosure, through configfs, by the same descriptions and plans.

nvmet has no bdevs: a namespace names a file or block device. So a description may have `aio` bdevs alone, and
their names exist in the description only. nvmet has no keyring either: the contents of a key file go into the
host's folder, and one host has the same keys in all subsystems. A listener is a link from a port to a
subsystem, and one port serves several subsystems.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agent.enclosure_control import records, steps
from agent.enclosure_control.configfs_files import (
    ConfigfsFiles,
    DryRunFiles,
    FileOperation,
    Link,
    MakeFolder,
    RemoveFolder,
    Unlink,
    Write,
)
from agent.enclosure_control.description import Description
from agent.enclosure_control.records import Address, Host, Namespace, Present, Subsystem
from agent.enclosure_control.steps import Step
from agent.errors import UserError, did_you_mean
from nvmeof.authentication.secret_files import SecretFileError, read_secret_file

ROOT: Final = Path("/sys/kernel/config/nvmet")
UNKNOWN_KEY: Final = "(a key that is not described)"
DH_GROUP: Final = "ffdhe2048"
NOT_ENABLED: Final = "(not enabled)"
TRAITS: Final = records.Traits(
    max_namespaces=None, transports_are_made=False, any_or_named=True, hosts_are_shared=True
)
_NOTHING: Final = Description.model_validate({})


class ConfigfsTarget:
    """nvmet below `root`. Raises ConfigfsError where the kernel refuses."""

    def __init__(self, root: Path = ROOT, files: ConfigfsFiles | None = None) -> None:
        self._root = root
        self._files = files or ConfigfsFiles()
        self._description = _NOTHING

    def check(self, description: Description) -> None:
        """UserError for a description that nvmet cannot carry out."""
        lacking = [
            f"[[{name}]]"
            for name in ("malloc", "null", "nvme", "lvol_stores", "lvols")
            if getattr(description, name)
        ]
        if lacking:
            raise UserError(
                f"nvmet has no {', '.join(lacking)}",
                "give it [[aio]] sections: files, or block devices such as /dev/nvme0n1",
            )
        for transport in description.transports:
            for name, _ in transport.options():
                if name != "in_capsule_data_size":
                    raise UserError(f"nvmet has no {name} for a transport", "leave it out")
        if any(each.ana_reporting is False for each in description.subsystems):
            raise UserError("nvmet always reports ANA", "leave ana_reporting out")
        nqns = [each.nqn for each in description.subsystems]
        nqns += [host.nqn for each in description.subsystems for host in each.hosts]
        for nqn in nqns:
            if "/" in nqn:
                raise UserError(
                    f"nvmet names folders by NQNs, and {nqn} has a slash", "choose an NQN without one"
                )
        aio = {each.name for each in description.aio}
        keys: dict[str, Host] = {}
        for subsystem in description.subsystems:
            for namespace in subsystem.namespaces:
                if namespace.bdev not in aio:
                    near = did_you_mean(namespace.bdev, aio)
                    raise UserError(
                        f"namespace {namespace.nsid}: there is no [[aio]] {namespace.bdev}{near}",
                        "describe it in an [[aio]] table",
                    )
            for host in subsystem.hosts:
                if keys.setdefault(host.nqn, host.record) != host.record:
                    raise UserError(
                        f"nvmet has one key for a host in all subsystems, and {host.nqn} has two",
                        "give it the same key everywhere",
                    )

    def read(self, description: Description | None = None) -> Present:
        """The present state of nvmet, in the names of `description`."""
        self._description = wanted = description or _NOTHING
        names = {each.file: each.name for each in wanted.aio}
        secrets = {_secret(each.file): each.name for each in wanted.keys}
        places: dict[str, list[Address]] = {}
        for number in self._files.names(self._root / "ports"):
            for nqn in self._files.names(self._root / "ports" / number / "subsystems"):
                places.setdefault(nqn, []).append(self._address(number))
        return Present(
            transports=tuple(records.Transport(each.type.upper()) for each in wanted.transports),
            keys=tuple(records.Key(each.name, each.file) for each in wanted.keys),
            bdevs=tuple(
                records.Bdev(each.name, "aio", each.block_size, 0, filename=each.file) for each in wanted.aio
            ),
            subsystems=tuple(
                self._subsystem(nqn, names, secrets, tuple(sorted(places.get(nqn, ()))))
                for nqn in self._files.names(self._root / "subsystems")
            ),
            traits=TRAITS,
        )

    def _address(self, number: str) -> Address:
        port = self._root / "ports" / number
        read = self._files.read
        return Address(
            trtype=read(port / "addr_trtype").upper(),
            traddr=records.canonical_address(read(port / "addr_traddr")),
            trsvcid=read(port / "addr_trsvcid"),
            adrfam="IPv6" if read(port / "addr_adrfam") == "ipv6" else "IPv4",
        )

    def _subsystem(
        self, nqn: str, names: dict[str, str], secrets: dict[str, str], places: tuple[Address, ...]
    ) -> Subsystem:
        folder = self._root / "subsystems" / nqn
        read = self._files.read
        namespaces = []
        for number in sorted(self._files.names(folder / "namespaces"), key=int):
            namespace = folder / "namespaces" / number
            path = read(namespace / "device_path")
            namespaces.append(
                Namespace(
                    int(number),
                    names.get(path, path) if read(namespace / "enable") == "1" else NOT_ENABLED,
                    records.canonical_nguid(read(namespace / "device_nguid")),
                    records.canonical_uuid(read(namespace / "device_uuid")),
                )
            )
        hosts = []
        for host in self._files.names(folder / "allowed_hosts"):
            keys = []
            for attribute in ("dhchap_key", "dhchap_ctrl_key"):
                secret = read(self._root / "hosts" / host / attribute)
                keys.append(secrets.get(secret, UNKNOWN_KEY) if secret else None)
            hosts.append(Host(host, keys[0], keys[1]))
        return Subsystem(
            nqn,
            serial=read(folder / "attr_serial"),
            model=read(folder / "attr_model"),
            allow_any_host=read(folder / "attr_allow_any_host") == "1",
            namespaces=tuple(namespaces),
            listeners=places,
            hosts=tuple(hosts),
        )

    def check_steps(self, steps: Sequence[Step]) -> None:
        """`check` was enough."""

    def perform(self, step: Step) -> None:
        self._files.carry_out(self.operations(step))

    def show(self, steps: Sequence[Step]) -> list[str]:
        """The operations of each step, as a shell would write them, after the steps before it."""
        dry = DryRunFiles(self._files)
        after = ConfigfsTarget(self._root, dry)
        after._description = self._description
        shown = []
        for step in steps:
            operations = after.operations(step)
            shown.append("; ".join(str(each) for each in operations))
            dry.carry_out(operations)
        return shown

    def close(self) -> None:
        """It holds nothing open."""

    def operations(self, step: Step) -> list[FileOperation]:
        """The operations that carry `step` out, given the present state."""
        subsystems = self._root / "subsystems"
        match step:
            case steps.CreateSubsystem():
                folder = subsystems / step.nqn
                made: list[FileOperation] = [
                    MakeFolder(folder), Write(folder / "attr_allow_any_host", str(int(step.allow_any_host))),
                ]  # fmt: skip
                for name, value in (("attr_serial", step.serial_number), ("attr_model", step.model_number)):
                    made += [Write(folder / name, value)] if value is not None else []
                return made
            case steps.DeleteSubsystem(nqn):
                return self._delete(nqn)
            case steps.SetAllowAnyHost(nqn, allow):
                # The kernel wants one or the other: with hosts named, it refuses to let in any.
                return [Write(subsystems / nqn / "attr_allow_any_host", str(int(allow)))]
            case steps.AddNamespace(nqn, namespace):
                return self._add_namespace(subsystems / nqn / "namespaces" / str(namespace.nsid), namespace)
            case steps.RemoveNamespace(nqn, nsid):
                folder = subsystems / nqn / "namespaces" / str(nsid)
                return [Write(folder / "enable", "0"), RemoveFolder(folder)]
            case steps.AddListener(nqn, place):
                return self._add_listener(nqn, place)
            case steps.RemoveListener(nqn, place):
                return self._remove_listener(nqn, self._port_of(place))
            case steps.AddHost(nqn, host):
                folder = self._root / "hosts" / host.nqn
                fresh: list[FileOperation] = [] if self._there("hosts", host.nqn) else [MakeFolder(folder)]
                return [
                    *fresh, *self._keys(host), Link(subsystems / nqn / "allowed_hosts" / host.nqn, folder),
                ]  # fmt: skip
            case steps.SetKeys(_, host):
                return self._keys(host)
            case steps.RemoveHost(nqn, host_nqn):
                return self._remove_host(nqn, host_nqn)
            case steps.AddKey():
                return []
            case _:
                raise UserError(f"nvmet cannot do this: {step}", "SPDK can: --rpc names its socket")

    def _there(self, *parts: str) -> bool:
        return parts[-1] in self._files.names(self._root.joinpath(*parts[:-1]))

    def _add_namespace(self, folder: Path, namespace: Namespace) -> list[FileOperation]:
        files = {each.name: each.file for each in self._description.aio}
        made: list[FileOperation] = [
            MakeFolder(folder), Write(folder / "device_path", files[namespace.bdev]),
        ]  # fmt: skip
        for name, value in (("device_nguid", namespace.nguid), ("device_uuid", namespace.uuid)):
            made += [Write(folder / name, records.canonical_uuid(value))] if value else []
        return [*made, Write(folder / "enable", "1")]

    def _keys(self, host: Host) -> list[FileOperation]:
        files = {each.name: each.file for each in self._description.keys}
        made: list[FileOperation] = []
        folder = self._root / "hosts" / host.nqn
        for attribute, name in (("dhchap_key", host.key), ("dhchap_ctrl_key", host.controller_key)):
            if name is not None:
                if name not in files:
                    raise UserError(
                        f"{host.nqn}: there is no [[keys]] {name}", "describe it in a [[keys]] table"
                    )
                made.append(Write(folder / attribute, _secret(files[name]), source=files[name]))
        # nvmet's default is no Diffie-Hellman: a listener on the wire could then try out secrets offline.
        return [*made, Write(folder / "dhchap_dhgroup", DH_GROUP)] if made else []

    def _remove_host(self, nqn: str, host_nqn: str) -> list[FileOperation]:
        ended: list[FileOperation] = [Unlink(self._root / "subsystems" / nqn / "allowed_hosts" / host_nqn)]
        others = [
            each
            for each in self._files.names(self._root / "subsystems")
            if each != nqn and self._there("subsystems", each, "allowed_hosts", host_nqn)
        ]
        return ended if others else [*ended, RemoveFolder(self._root / "hosts" / host_nqn)]

    def _port_of(self, place: Address) -> str | None:
        for number in self._files.names(self._root / "ports"):
            if self._address(number) == place:
                return number
        return None

    def _add_listener(self, nqn: str, place: Address) -> list[FileOperation]:
        made: list[FileOperation] = []
        number = self._port_of(place)
        if number is None:
            taken = set(self._files.names(self._root / "ports"))
            number = next(str(each) for each in range(1, 1 << 16) if str(each) not in taken)
            port = self._root / "ports" / number
            made = [
                MakeFolder(port),
                Write(port / "addr_trtype", place.trtype.lower()),
                Write(port / "addr_adrfam", place.adrfam.lower()),
                Write(port / "addr_traddr", place.traddr),
                Write(port / "addr_trsvcid", place.trsvcid),
            ]
            for transport in self._description.transports:
                if transport.type.upper() == place.trtype and transport.in_capsule_data_size is not None:
                    size = str(transport.in_capsule_data_size)
                    made.append(Write(port / "param_inline_data_size", size))
        return [
            *made, Link(self._root / "ports" / number / "subsystems" / nqn, self._root / "subsystems" / nqn),
        ]  # fmt: skip

    def _remove_listener(self, nqn: str, number: str | None) -> list[FileOperation]:
        if number is None:
            return []
        port = self._root / "ports" / number
        ended: list[FileOperation] = [Unlink(port / "subsystems" / nqn)]
        return ended if self._files.names(port / "subsystems") != [nqn] else [*ended, RemoveFolder(port)]

    def _delete(self, nqn: str) -> list[FileOperation]:
        folder = self._root / "subsystems" / nqn
        ended: list[FileOperation] = []
        for number in self._files.names(self._root / "ports"):
            if self._there("ports", number, "subsystems", nqn):
                ended += self._remove_listener(nqn, number)
        for host in self._files.names(folder / "allowed_hosts"):
            ended += self._remove_host(nqn, host)
        for nsid in self._files.names(folder / "namespaces"):
            namespace = folder / "namespaces" / nsid
            ended += [Write(namespace / "enable", "0"), RemoveFolder(namespace)]
        return [*ended, RemoveFolder(folder)]


def _secret(path: str) -> str:
    """The secret in a key file, as nvmet takes it. Raises UserError, which does not quote it."""
    try:
        return read_secret_file(Path(path)).text()
    except SecretFileError as error:
        raise UserError(error.message, error.advice) from None
