"""The pool map: a small document that every agent reads and that says what the pool consists of.

It lies on every namespace of the pool (superblock.py). It lists the namespaces by NGUID and the volumes with
their extents; a key's place follows from it and from the volume's secret alone. Its version grows with every
change, and the greatest version is in force. `seal`: map_seal.py.

The root key wraps the tenants' keys, a tenant's key wraps the secrets of its volumes
(agent/inline/secrets.py). Each is wrapped for a context, made of the fields of its row, and opens in that
context alone. So a map that was edited without the root key opens nothing under another name, tenant, face,
cipher, size or epoch. Namespaces, extents, copies, limits and that a key is gone are in no context: an
attacker can take away by them, and gives nothing. An agent remembers which epochs are over
(agent/attach/map_history.py).
"""

# One idea in one file: the document, the contexts of its keys, and the plan of a new one.

import itertools
import struct
import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from agent.errors import ConfigError, expected_there
from agent.inline.cipher_suites import SUITES
from agent.inline.secrets import (
    Purpose,
    RootKey,
    SecretKey,
    WrongKey,
    new_tenant_key,
    new_volume_secret,
    unwrap_secret,
    wrap_secret,
)
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.format.sealed_slot import UNIT_BYTES_MIN, UNITS_MAX
from agent.pool.map.names import TenantName, VolumeName, checked_name
from agent.pool.volume.settings import LOCAL_NGUID, KvShare, VolumeExtent, VolumeSettings

DATA_START = 1 << 20
"""Where the first extent of a namespace begins; the superblocks lie before it."""
EXTENT_ALIGNMENT = 1 << 20
NAMESPACES_MAX = 4096
NAMESPACE_BYTES_MAX = 1 << 60
SETS_MAX = 1 << 40
"""Of one extent: more than the greatest namespace has room for."""
VERSION_MAX = 1 << 62
VERSIONS_AHEAD_MAX = 1 << 32
"""How far a version may be ahead of another that counts (reconcile.py). Each change adds one."""
EPOCHS_AHEAD_MAX = 1 << 16
"""How far the epoch of an erased tenant, for which no key vouches, may be ahead of a known one."""
VOLUMES_MAX = 64
TENANTS_MAX = 64
VALUE_BYTES_MIN, VALUE_BYTES_MAX = 1 << 16, 1 << 24
NAMES_BYTES_MIN, NAMES_BYTES_MAX = 1 << 12, 1 << 14
"""The least and the greatest size of the slots for the names of a shared volume."""
MARKS_ARE_FOR = "for key-value volumes in sets, of one copy"
NAMES = "shared-names"
"""The kind of the volumes that have them."""
NAMES_PER_CHUNK = 2
"""Slots for names that a shared volume has for each slot of its chunks."""
NAMES_SUFFIX = ".names"
"""What the second part of a shared volume is called after its first."""
KV_VALUE_BYTES_MAX = 2 << 20
"""On KV namespaces: a slot is brought by one Retrieve, into a worker's buffer."""

Hex32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
HexBytes = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2}){1,512}$")]
WrappedOrErased = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2}){0,512}$")]
Layout = Literal["auto", "sets", "kv"]
"""Where a volume lies: in sets of slots on namespaces of blocks, or on KV namespaces."""
SuiteName = Literal["aes-256-gcm", "aes-256-xts+crc64", "plain+crc64"]
assert set(SUITES) == {"aes-256-gcm", "aes-256-xts+crc64", "plain+crc64"}


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MapNamespace(_Document):
    """One namespace of the pool; `bytes` is its size when it joined."""

    nguid: Hex32
    bytes: int = Field(gt=0, le=NAMESPACE_BYTES_MAX)
    kind: Literal["blocks", "kv"] = "blocks"
    """`kv`: of the KV command set."""


class MapExtent(_Document):
    """Part of a volume: `sets` sets at `offset` bytes of the namespace with this NGUID."""

    nguid: Hex32
    offset: int = Field(ge=DATA_START, le=NAMESPACE_BYTES_MAX, multiple_of=4096)
    sets: int = Field(gt=0, le=SETS_MAX)


def _check_sizes(kind: str, value_bytes: int, unit_bytes: int) -> None:
    """Raises ValueError where values of this capacity are not for the kind of volume, or cannot be sealed in
    units of that size."""
    least, most = (NAMES_BYTES_MIN, NAMES_BYTES_MAX) if kind == NAMES else (VALUE_BYTES_MIN, VALUE_BYTES_MAX)
    if not least <= value_bytes <= most:
        raise ValueError(f"values of {value_bytes} bytes: a volume of kind {kind} takes {least} to {most}")
    if unit_bytes & (unit_bytes - 1):
        raise ValueError(f"units of {unit_bytes} bytes: it takes a power of two")
    if -(-value_bytes // unit_bytes) > UNITS_MAX:
        raise ValueError(f"values of {value_bytes} bytes take units of 1/{UNITS_MAX} of that, or more")


class MapVolume(_Document):
    """One volume. `kind` says which face serves it: `kv`; `files` for the blocks behind /fs; `shared` for the
    chunks behind /shared, and `shared-names` for the names that lead to them. A shared volume is one of each.
    """

    name: VolumeName
    volume_id: Hex32
    tenant: Hex32
    kind: Literal["kv", "files", "shared", "shared-names"]
    names_of: Hex32 | Literal[""] = ""
    """The id of the shared volume whose names it has."""
    value_bytes: int = Field(ge=NAMES_BYTES_MIN, le=VALUE_BYTES_MAX, multiple_of=4096)
    unit_bytes: int = Field(ge=UNIT_BYTES_MIN, le=1 << 20)
    suite: SuiteName
    ttl_seconds: int = Field(ge=0, lt=1 << 31)
    wrapped_secret: HexBytes
    earlier_secret: WrappedOrErased = ""
    """While its data key is rotated, the secret with the key from before; only the data key differs."""
    key_epoch: int = Field(default=0, ge=0, lt=1 << 31)
    """How often its data key was rotated."""
    extents: tuple[MapExtent, ...] = Field((), max_length=NAMESPACES_MAX)
    kv_namespaces: tuple[Hex32, ...] = Field((), max_length=NAMESPACES_MAX)
    """The KV namespaces that it has to itself, instead of extents."""
    settled: int = Field(default=0, ge=0, le=NAMESPACES_MAX)
    """Values may still lie where the first so many extents alone would have them (join.py); 0: none do."""
    copies: Literal[1, 2] = 1
    local_first: bool = False
    """Its first copies lie on servers' own SSDs, its second in enclosures (placement.py)."""
    mark_blocks: Literal[0, 1] = 0
    """1: behind each directory lies a block of marks of values in G4 (mark_block.py)."""

    @property
    def set_bytes(self) -> int:
        return set_size(self.value_bytes, self.mark_blocks)

    @model_validator(mode="after")
    def _can_be_sealed(self) -> "MapVolume":
        _check_sizes(self.kind, self.value_bytes, self.unit_bytes)
        if bool(self.names_of) != (self.kind == NAMES):
            raise ValueError(f"volume {self.name} of kind {self.kind} has names of '{self.names_of}'")
        places = self.kv_namespaces or tuple(extent.nguid for extent in self.extents)
        if len(set(places)) != len(places):
            raise ValueError(f"volume {self.name} lies twice on one namespace")
        if bool(self.extents) == bool(self.kv_namespaces):
            raise ValueError(f"volume {self.name} lies either in extents or on KV namespaces")
        if self.settled and self.settled >= len(self.extents):
            raise ValueError(f"of volume {self.name} more extents are settled than there are")
        if self.kv_namespaces and (self.kind != "kv" or self.value_bytes > KV_VALUE_BYTES_MAX):
            raise ValueError(f"volume {self.name} cannot lie on KV namespaces")
        if self.copies > 1 and (self.kind != "kv" or self.kv_namespaces):
            raise ValueError(f"volume {self.name} keeps two copies: for key-value volumes in sets only")
        if self.local_first and self.copies < 2:
            raise ValueError(f"volume {self.name} of one copy has no first one")
        if self.mark_blocks and (self.kind != "kv" or self.kv_namespaces or self.copies > 1):
            raise ValueError(f"volume {self.name} has blocks of marks: {MARKS_ARE_FOR}")
        if self.earlier_secret and not self.key_epoch:
            raise ValueError(f"volume {self.name} has an earlier key before its first")
        return self


class MapTenant(_Document):
    """A tenant and its key, wrapped by the root key; empty once the tenant was erased."""

    name: TenantName
    tenant_id: Hex32
    wrapped_key: WrappedOrErased
    key_epoch: int = Field(default=0, ge=0, lt=1 << 31)
    """How often it got another key, because the one before was erased."""
    quota_slots: int = Field(default=0, ge=0, lt=1 << 63)
    quota_bytes: int = Field(default=0, ge=0, lt=1 << 63)
    bandwidth: int = Field(default=0, ge=0, lt=1 << 63)
    """Bytes a second. 0, and then left out of the map: no limit, as in the two above (docs/tenants.md)."""

    @model_validator(mode="after")
    def _is_itself(self) -> "MapTenant":
        if self.tenant_id != tenant_id(self.name):
            raise ValueError(f"tenant {self.name} stands under the id of another")
        return self

    @property
    def is_erased(self) -> bool:
        return not self.wrapped_key


class PoolMap(_Document):
    pool_id: Hex32
    version: int = Field(ge=1, le=VERSION_MAX)
    namespaces: tuple[MapNamespace, ...] = Field(min_length=1, max_length=NAMESPACES_MAX)
    volumes: tuple[MapVolume, ...] = Field(max_length=VOLUMES_MAX)
    tenants: tuple[MapTenant, ...] = Field((), max_length=TENANTS_MAX)
    seal: WrappedOrErased = ""

    @model_validator(mode="after")
    def _holds_together(self) -> "PoolMap":
        sizes = {namespace.nguid: namespace.bytes for namespace in self.namespaces}
        if len(sizes) != len(self.namespaces):
            raise ValueError("a namespace is listed twice")
        if len({volume.name for volume in self.volumes}) != len(self.volumes):
            raise ValueError("two volumes have one name")
        if len({volume.volume_id for volume in self.volumes}) != len(self.volumes):
            raise ValueError("two volumes have one id")
        tenants = {tenant.tenant_id for tenant in self.tenants}
        if len(tenants) != len(self.tenants) or len({each.name for each in self.tenants}) != len(tenants):
            raise ValueError("a tenant is listed twice")
        if any(volume.tenant not in tenants for volume in self.volumes):
            raise ValueError("a volume belongs to nobody")
        shared = sorted((each.volume_id, each.tenant) for each in self.volumes if each.kind == "shared")
        if shared != sorted((each.names_of, each.tenant) for each in self.volumes if each.kind == NAMES):
            raise ValueError("a shared volume has no names, or names of another tenant")
        kinds = {namespace.nguid: namespace.kind for namespace in self.namespaces}
        for volume in self.volumes:
            blocks = all(kinds.get(extent.nguid) != "kv" for extent in volume.extents)
            if not blocks or any(kinds.get(nguid) != "kv" for nguid in volume.kv_namespaces):
                raise ValueError(f"volume {volume.name} lies on namespaces of another kind")
        whole = [nguid for volume in self.volumes for nguid in volume.kv_namespaces]
        if len(set(whole)) != len(whole):
            raise ValueError("two volumes lie on one KV namespace")
        taken: dict[str, list[tuple[int, int]]] = {}
        for volume in self.volumes:
            set_bytes = volume.set_bytes
            for extent in volume.extents:
                end = extent.offset + extent.sets * set_bytes
                if end > sizes.get(extent.nguid, 0):
                    raise ValueError(f"volume {volume.name} reaches past its namespace")
                taken.setdefault(extent.nguid, []).append((extent.offset, end))
        for spans in taken.values():
            spans.sort()
            if any(start < end for (_, end), (start, _) in itertools.pairwise(spans)):
                raise ValueError("two extents overlap")
        return self

    def encode(self) -> bytes:
        # Without what is as by default: such a map is short, and read by agents that know no such field.
        return self.model_dump_json(exclude_defaults=True).encode()

    def settings(self, volume: MapVolume) -> VolumeSettings:
        """A volume as the data path knows it, its namespaces numbered as in this map."""
        index = {namespace.nguid: number for number, namespace in enumerate(self.namespaces)}
        return VolumeSettings(
            volume.name,
            bytes.fromhex(volume.tenant),
            bytes.fromhex(volume.volume_id),
            volume.kind,
            volume.value_bytes,
            volume.unit_bytes,
            volume.suite,
            volume.ttl_seconds,
            tuple(
                VolumeExtent(index[extent.nguid], bytes.fromhex(extent.nguid), extent.offset, extent.sets)
                for extent in volume.extents
            ),
            tuple(
                KvShare(index[nguid], bytes.fromhex(nguid), self.namespaces[index[nguid]].bytes)
                for nguid in volume.kv_namespaces
            ),
            volume.settled,
            volume.copies,
            volume.local_first,
            bytes.fromhex(volume.names_of),
            volume.mark_blocks,
        )

    def tenant_of(self, volume: MapVolume) -> MapTenant:
        return next(each for each in self.tenants if each.tenant_id == volume.tenant)

    def is_erased(self, volume: MapVolume) -> bool:
        """Whether nobody can open the volume any more."""
        return self.tenant_of(volume).is_erased

    def secret(self, volume: MapVolume, root: RootKey) -> SecretKey:
        """The volume's secret. Raises ConfigError: another root key, an erased tenant, or a map changed
        without the key."""
        if self.is_erased(volume):
            raise ConfigError(
                f"the tenant of volume {volume.name} was erased", "nothing brings back what it held"
            )
        return self._opened(volume, volume.wrapped_secret, volume.key_epoch, root)

    def earlier_secret(self, volume: MapVolume, root: RootKey) -> SecretKey | None:
        """The secret from before the rotation that is under way; None where none is. Raises ConfigError."""
        if not volume.earlier_secret:
            return None
        return self._opened(volume, volume.earlier_secret, volume.key_epoch - 1, root)

    def _opened(self, volume: MapVolume, wrapped_hex: str, epoch: int, root: RootKey) -> SecretKey:
        context, wrapped = volume_context(self.pool_id, volume, epoch), bytes.fromhex(wrapped_hex)
        try:
            key = tenant_key(self.pool_id, self.tenant_of(volume), root)
            return unwrap_secret(key, Purpose.VOLUME, context, wrapped)
        except WrongKey:
            raise ConfigError(
                f"the root key does not open volume {volume.name} of pool {self.pool_id}",
                f"use the key that the pool was formatted with; this is {root.describe()}. If it is that "
                "one, somebody who has it not has changed the pool map; nothing has been changed",
            ) from None


def decode_pool_map_untrusted(data: bytes | memoryview) -> PoolMap:
    """A pool map out of what lay on a namespace. Raises ValueError, and nothing else, for bad bytes."""
    try:
        return PoolMap.model_validate_json(bytes(data), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"no pool map: {where} {expected_there(first)}") from None


def set_size(value_bytes: int, mark_blocks: int = 0) -> int:
    """Bytes of one set: its directory, with its marks, and 64 slots, each with a header."""
    return 4096 * (1 + mark_blocks) + SLOTS_PER_SET * (4096 + value_bytes)


class VolumeWish(_Document):
    """A volume as the operator asks for it; `share` is its part of the pool's bytes."""

    name: VolumeName
    kind: Literal["kv", "files", "shared", "shared-names"] = "kv"
    value_bytes: int = Field(ge=NAMES_BYTES_MIN, le=VALUE_BYTES_MAX, multiple_of=4096)
    unit_bytes: int = Field(1 << 18, ge=UNIT_BYTES_MIN, le=1 << 20)
    suite: SuiteName = "aes-256-gcm"
    ttl_seconds: int = Field(0, ge=0, lt=1 << 31)
    share: float = Field(gt=0, le=1)
    tenant: TenantName = "default"
    layout: Layout = "auto"
    copies: Literal[1, 2] = 1
    local_first: bool = False
    mark_blocks: Literal[0, 1] = 0

    @property
    def set_bytes(self) -> int:
        return set_size(self.value_bytes, self.mark_blocks)

    @model_validator(mode="after")
    def _can_be_sealed(self) -> "VolumeWish":
        _check_sizes(self.kind, self.value_bytes, self.unit_bytes)
        if self.copies > 1 and self.kind != "kv":
            raise ValueError("two copies are for key-value volumes")
        if self.local_first and self.copies < 2:
            raise ValueError("local_first says where the first of two copies lies: it wants copies = 2")
        if self.mark_blocks and (self.kind != "kv" or self.copies > 1 or self.layout == "kv"):
            raise ValueError(f"blocks of marks are {MARKS_ARE_FOR}")
        return self


def parts_of(wishes: Iterable[VolumeWish]) -> list[VolumeWish]:
    """The volumes to be made: of a shared one its chunks, and right behind them its names, which lie in some
    of its share. Raises ConfigError where its name is too long for both."""
    parts = []
    for wish in wishes:
        if wish.kind != "shared":
            parts.append(wish)
            continue
        name = wish.name + NAMES_SUFFIX
        try:
            checked_name(name)
        except ValueError as wrong:
            raise ConfigError(
                f"volume {wish.name} gets another one for its names: {wrong}", "take a shorter name"
            ) from None
        of_names, of_chunks = NAMES_PER_CHUNK * set_size(NAMES_BYTES_MAX), set_size(wish.value_bytes)
        share = wish.share * of_names / (of_names + of_chunks)
        sizes = {"value_bytes": NAMES_BYTES_MAX, "unit_bytes": UNIT_BYTES_MIN, "share": share}
        parts.append(wish.model_copy(update={"share": wish.share - share}))
        parts.append(wish.model_copy(update={"name": name, "kind": NAMES, **sizes}))
    return parts


def tenant_id(name: str) -> str:
    """The 16 bytes that stand for a tenant's name in every slot, as hex."""
    return uuid.uuid5(uuid.UUID("6a3c1f0e-35b7-5d51-8a35-000000000935"), name).hex


_TENANT = struct.Struct("<16s16sI")
_VOLUME = struct.Struct("<16s16s16sIIII")


def tenant_context(pool_id: str, tenant: MapTenant) -> bytes:
    """Pool, tenant and epoch (little-endian), then the name in UTF-8."""
    ids = bytes.fromhex(pool_id), bytes.fromhex(tenant.tenant_id)
    return _TENANT.pack(*ids, tenant.key_epoch) + tenant.name.encode()


def volume_context(pool_id: str, volume: MapVolume, epoch: int) -> bytes:
    """Pool, tenant, volume, sizes, time to live and epoch (little-endian); then kind, suite and name, a zero
    byte between them, which none of them has. At last, after another, whose names the volume has, if any."""
    ids = bytes.fromhex(pool_id), bytes.fromhex(volume.tenant), bytes.fromhex(volume.volume_id)
    fixed = _VOLUME.pack(*ids, volume.value_bytes, volume.unit_bytes, volume.ttl_seconds, epoch)
    texts = [volume.kind, volume.suite, volume.name, *([volume.names_of] if volume.names_of else [])]
    return fixed + b"\0".join(text.encode() for text in texts)


def new_tenant(
    pool_id: str, name: str, root: RootKey, before: MapTenant | None = None
) -> tuple[MapTenant, SecretKey]:
    """A tenant with a fresh key, which wraps its volumes' secrets. `before`: its row, where it was erased.
    Raises ConfigError for a name that no new tenant may have."""
    if before is None:
        try:
            checked_name(name)
        except ValueError as wrong:
            raise ConfigError(f"no such tenant can be made: {wrong}", "name it otherwise") from None
    key, epoch = new_tenant_key(), 0 if before is None else before.key_epoch + 1
    blank = before or MapTenant(name=name, tenant_id=tenant_id(name), wrapped_key="")
    tenant = blank.model_copy(update={"key_epoch": epoch})
    wrapped = root.wrap(Purpose.TENANT, tenant_context(pool_id, tenant), key)
    return tenant.model_copy(update={"wrapped_key": wrapped.hex()}), key


def tenant_key(pool_id: str, tenant: MapTenant, root: RootKey) -> SecretKey:
    """The key of a tenant that was not erased. Raises WrongKey."""
    return root.unwrap(Purpose.TENANT, tenant_context(pool_id, tenant), bytes.fromhex(tenant.wrapped_key))


def wrapped_for(pool_id: str, volume: MapVolume, secret: SecretKey, key: SecretKey) -> str:
    """A secret of a volume as it stands in the map: wrapped by its tenant's key, for what the row says."""
    context = volume_context(pool_id, volume, volume.key_epoch)
    return wrap_secret(key, Purpose.VOLUME, context, secret).hex()


class ExtentLayout:
    """Where the next extent of each namespace (NGUID, bytes) begins, after those that there are."""

    def __init__(self, members: list[tuple[bytes, int]], taken: Iterable[MapVolume] = ()) -> None:
        self._sizes = dict(members)
        self._next = dict.fromkeys(self._sizes, DATA_START)
        for volume in taken:
            for extent in volume.extents:
                self._skip(bytes.fromhex(extent.nguid), extent, volume.set_bytes)

    def _skip(self, nguid: bytes, extent: MapExtent, set_bytes: int) -> None:
        end = extent.offset + extent.sets * set_bytes
        self._next[nguid] = max(self._next[nguid], -(-end // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT)

    def by_share(self, wish: VolumeWish) -> list[MapExtent]:
        """The volume's share of every namespace, in whole sets; none where that is less than one."""
        return [
            self._take(nguid, wish.set_bytes, sets)
            for nguid in self._sizes
            if (sets := min(int((self._sizes[nguid] - DATA_START) * wish.share), self._left(nguid))
                // wish.set_bytes) > 0
        ]  # fmt: skip

    def one_set(self, wish: VolumeWish) -> list[MapExtent]:
        """A single set where most room is left. Raises ConfigError where it does not fit."""
        roomiest = max(self._sizes, key=self._left)
        if self._left(roomiest) < wish.set_bytes:
            raise ConfigError(
                f"no namespace has room for one set of volume {wish.name} ({wish.set_bytes >> 20} MiB)",
                "give it a larger share, smaller values, or larger drives",
            )
        return [self._take(roomiest, wish.set_bytes, 1)]

    def up_to(self, nguid: bytes, set_bytes: int, sets: int) -> MapExtent | None:
        """So many sets of a namespace, or as many as there is room for; None where that is none."""
        fit = min(sets, self._left(nguid) // set_bytes)
        return self._take(nguid, set_bytes, fit) if fit > 0 else None

    def _left(self, nguid: bytes) -> int:
        return self._sizes[nguid] - self._next[nguid]

    def _take(self, nguid: bytes, set_bytes: int, sets: int) -> MapExtent:
        extent = MapExtent(nguid=nguid.hex(), offset=self._next[nguid], sets=sets)
        self._skip(nguid, extent, set_bytes)
        return extent


def lies_on_kv(wish: VolumeWish, *, blocks: bool) -> bool:
    """Whether a volume goes to KV namespaces; `blocks`: there are namespaces of blocks."""
    return wish.layout == "kv" or (wish.layout == "auto" and not blocks)


def check_shares(in_sets: Iterable[float]) -> None:
    """Raises ConfigError where the shares of volumes in sets are more than there is."""
    total = sum(in_sets)
    if total > 1 + 1e-9:
        raise ConfigError(
            f"the volumes' shares add up to {total:g}, which is more than 1", "lower some of them"
        )


def plan_pool(
    namespaces: Iterable[tuple[bytes, int]],
    wishes: Iterable[VolumeWish],
    root: RootKey,
    kv_namespaces: Iterable[tuple[bytes, int]] = (),
) -> PoolMap:
    """A map for a new pool: every volume on every namespace, in shares of each one's bytes.

    `namespaces` and `kv_namespaces` are (NGUID, bytes). One volume gets the latter whole; without it they are
    left out. Raises ConfigError where shares or sizes do not fit.
    """
    try:
        return _plan(list(namespaces), list(kv_namespaces), list(wishes), root)
    except ValidationError as error:
        raise ConfigError(
            f"that makes no pool: {expected_there(error.errors()[0])}",
            "change the volumes in the configuration",
        ) from None


def _plan(
    members: list[tuple[bytes, int]],
    kv_members: list[tuple[bytes, int]],
    volumes: list[VolumeWish],
    root: RootKey,
) -> PoolMap:
    if not members and not kv_members:
        raise ConfigError("a pool needs at least one namespace", "check the enclosures in the configuration")
    volumes = parts_of(volumes)
    on_kv = [wish for wish in volumes if lies_on_kv(wish, blocks=bool(members))]
    in_sets = [wish for wish in volumes if wish not in on_kv]
    _check_layouts(on_kv, in_sets, members, kv_members)
    check_shares(wish.share for wish in in_sets)
    if not in_sets and on_kv:
        members = []
    pool_id = uuid.uuid4().hex
    layout = ExtentLayout(members)
    extents = {wish.name: layout.by_share(wish) for wish in in_sets}
    tenants = {name: new_tenant(pool_id, name, root) for name in sorted({wish.tenant for wish in volumes})}
    planned: list[MapVolume] = []
    for wish in volumes:
        found: list[MapExtent] = []
        if wish in in_sets:
            # A share that is less than a set everywhere still gets one, from what the shares left over.
            found = extents[wish.name] or layout.one_set(wish)
        whole = () if found else tuple(nguid.hex() for nguid, _ in kv_members)
        planned.append(new_volume(pool_id, wish, tenants[wish.tenant][1], tuple(found), whole, planned))
    listed = [MapNamespace(nguid=nguid.hex(), bytes=size) for nguid, size in members]
    if on_kv:
        listed += [MapNamespace(nguid=nguid.hex(), bytes=size, kind="kv") for nguid, size in kv_members]
    return PoolMap(
        pool_id=pool_id,
        version=1,
        namespaces=tuple(listed),
        volumes=tuple(planned),
        tenants=tuple(tenant for tenant, _ in tenants.values()),
    )


def new_volume(
    pool_id: str,
    wish: VolumeWish,
    key: SecretKey,
    extents: tuple[MapExtent, ...],
    kv_namespaces: tuple[str, ...] = (),
    made: Sequence[MapVolume] = (),
) -> MapVolume:
    """A volume with a fresh id and secret, wrapped by `key`, its tenant's. `made`: those before it, the last
    of which a volume of names belongs to. Raises ConfigError."""
    if wish.copies > 1 and len(extents) < 2:
        raise ConfigError(
            f"volume {wish.name} is to keep two copies, and lies on fewer than two namespaces of blocks",
            "add drives, give it a larger share, or take copies = 2 away",
        )
    if wish.local_first and len({each.nguid.startswith(LOCAL_NGUID.hex()) for each in extents}) < 2:
        raise ConfigError(
            f"volume {wish.name} is to keep its first copy on a server's own SSD and its second in an "
            "enclosure, and does not lie on both",
            "add a [[local]] namespace or an enclosure, or take local_first away",
        )
    if wish.mark_blocks and kv_namespaces:
        raise ConfigError(
            f"volume {wish.name} is to have 340 marks for each set, and lies on KV namespaces",
            "take marks = 340 away",
        )
    volume = MapVolume(
        volume_id=uuid.uuid4().hex,
        names_of=made[-1].volume_id if wish.kind == NAMES else "",
        tenant=tenant_id(wish.tenant),
        wrapped_secret="00",
        extents=extents,
        kv_namespaces=kv_namespaces,
        **wish.model_dump(exclude={"share", "tenant", "layout"}),
    )
    wrapped = wrapped_for(pool_id, volume, new_volume_secret(), key)
    return volume.model_copy(update={"wrapped_secret": wrapped})


def _check_layouts(
    on_kv: list[VolumeWish],
    in_sets: list[VolumeWish],
    members: list[tuple[bytes, int]],
    kv_members: list[tuple[bytes, int]],
) -> None:
    """Raises ConfigError where a volume has no namespaces of its kind, or cannot have them."""
    for wish in on_kv:
        if wish.kind != "kv":
            what = "blocks" if wish.kind == "files" else "chunks"
            raise ConfigError(
                f"volume {wish.name} holds {what} of files, which do not lie on KV namespaces",
                "add drives of logical blocks for it",
            )
    if len(on_kv) > 1:
        names = ", ".join(wish.name for wish in on_kv)
        raise ConfigError(
            f"one volume takes the KV namespaces whole, and {len(on_kv)} want to: {names}",
            'give the others layout = "sets" and namespaces of blocks, or drives of their own pool',
        )
    for wish in on_kv:
        if not kv_members:
            raise ConfigError(f"there is no KV namespace for volume {wish.name}", 'take layout = "kv" away')
        if wish.value_bytes > KV_VALUE_BYTES_MAX:
            raise ConfigError(
                f"values of {wish.value_bytes} bytes do not lie on KV namespaces",
                f"{KV_VALUE_BYTES_MAX} bytes are the most",
            )
    if in_sets and not members:
        raise ConfigError(f"there is no namespace of blocks for volume {in_sets[0].name}", "add some drives")
