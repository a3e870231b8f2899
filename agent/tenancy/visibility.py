"""Which volumes stand behind a door: those of the tenants that it is for.

A face knows its own volumes and no others. So it answers about another tenant's volume as about a volume that
does not exist, by the same steps; no check could be forgotten or timed.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from agent.errors import ConfigError
from agent.pool.access import ServedVolume
from agent.pool.map.document import PoolMap, tenant_id
from agent.telemetry import snapshot


@dataclass(frozen=True, slots=True)
class Members:
    """What the pool map names, whether it can still be opened or was erased."""

    tenants: frozenset[bytes]
    """By id."""
    nameable: frozenset[str]
    """Volumes of the kinds `kv` and `shared`, by name."""

    @classmethod
    def of(cls, pool_map: PoolMap) -> "Members":
        ids = {each.tenant for each in pool_map.volumes} | {each.tenant_id for each in pool_map.tenants}
        return cls(
            frozenset(bytes.fromhex(each) for each in ids),
            frozenset(each.name for each in pool_map.volumes if each.kind in ("kv", "shared")),
        )


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The two volumes that a shared one consists of. Its users know the first alone."""

    chunks: ServedVolume
    names: ServedVolume


@dataclass(frozen=True, slots=True)
class Audience:
    """Whom a door is for. Without `tenants` it is for all of them, without `volumes` for all of theirs."""

    where: str
    """The table of the configuration, for messages."""
    tenants: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()

    @property
    def is_for_all(self) -> bool:
        return not self.tenants and not self.volumes

    def _is_for(self, volume: ServedVolume) -> bool:
        return not self.tenants or volume.settings.tenant in map(_id_of, self.tenants)

    def check(self, members: Members) -> None:
        """Raises ConfigError where the door names what the pool has not. What was erased is not missed."""
        missing = set(self.volumes) - members.nameable
        if missing:
            raise ConfigError(
                f"{self.where}.volumes names {', '.join(sorted(missing))}, no key-value or shared volume of "
                "this pool",
                f"it has {', '.join(sorted(members.nameable)) or 'none'}",
            )
        strangers = [name for name in self.tenants if _id_of(name) not in members.tenants]
        if strangers:
            raise ConfigError(
                f"{self.where}.tenants names {', '.join(sorted(strangers))}, no tenant of this pool",
                "see g35 tenant list",
            )

    def key_value(self, volumes: Sequence[ServedVolume]) -> list[ServedVolume]:
        return [each for each in volumes if each.settings.kind == "kv" and self._shows(each)]

    def shared(self, volumes: Sequence[ServedVolume]) -> list[SharedParts]:
        names = {each.settings.names_of: each for each in volumes if each.settings.names_of}
        return [
            SharedParts(each, names[each.settings.volume_id])
            for each in volumes
            if each.settings.kind == "shared" and each.settings.volume_id in names and self._shows(each)
        ]

    def in_status(self, volumes: Sequence[ServedVolume]) -> list[ServedVolume]:
        """The volumes that its status tells of: those that it shows, with the names of the shared ones."""
        shown = {id(each) for each in self.key_value(volumes)}
        for parts in self.shared(volumes):
            shown |= {id(parts.chunks), id(parts.names)}
        return [each for each in volumes if id(each) in shown]

    def _shows(self, volume: ServedVolume) -> bool:
        return self._is_for(volume) and (not self.volumes or volume.settings.name in self.volumes)

    def shows_files(self, volumes: Sequence[ServedVolume]) -> bool:
        """Whether it may show /fs: there is one for all volumes of blocks, and so for all whose they are."""
        return all(self._is_for(volume) for volume in volumes if volume.settings.kind == "files")

    def sources(
        self, whole: snapshot.Sources, own: Sequence[ServedVolume], *, guest: bool = False
    ) -> snapshot.Sources:
        """The sources of a status behind this door: nothing that other tenants have a part in, and for a
        `guest` nothing of the machine that serves it, nor of other guests. `own`: see `in_status`."""
        if self.is_for_all and not guest:
            return whole
        volumes = [each.volume for each in own]
        mount, door = ("", "virtiofs") if guest else (whole.mount, whole.door)
        return dataclasses.replace(
            whole, volumes=volumes, files=lambda: None, doors=dict, whole=False, guest=guest, mount=mount,
            door=door,
        )  # fmt: skip


def _id_of(name: str) -> bytes:
    return bytes.fromhex(tenant_id(name))
