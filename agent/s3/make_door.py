"""The S3 door from the configuration and the pool's volumes."""

import logging
import os
from collections.abc import Callable, Container, Iterable, MutableMapping, Sequence
from functools import partial
from pathlib import Path

from agent.config.s3_section import S3Section
from agent.errors import ConfigError
from agent.fs.doors.door import MakeRunner
from agent.fs.files.metadata_pool import NamesElsewhere
from agent.fs.files.options import FilesOptions
from agent.fs.files.pool_store import store_for
from agent.host_os.per_user_bounds import Bounds
from agent.pool.map.document import tenant_id
from agent.pool.steps import IoChannel
from agent.pool.volume.volume import PoolVolume, Volume, in_sets
from agent.s3.credentials import AccessKey, read_credentials_file
from agent.s3.door import S3Door
from agent.s3.rdma.engine import TransferEngine
from agent.s3.store import ObjectStore
from nvmeof.errors import NvmeofError
from nvmeof.transport.base import DEFAULT_PROVIDER

log = logging.getLogger(__name__)


def make_s3_door(
    section: S3Section,
    volumes: Sequence[PoolVolume],
    state: Path,
    options: FilesOptions,
    channel: Callable[[], IoChannel],
    make_runner: MakeRunner,
    erased: Container[str] = (),
    pool_id: str = "",
    not_served: MutableMapping[str, str] | None = None,
    bounds: Bounds | None = None,
    verbs_provider: str = DEFAULT_PROVIDER,
    enclosures: Callable[[], Iterable[str]] = tuple,
    *,
    is_shared: bool = False,
) -> S3Door:
    """A door, not open yet, with its names in files in `state`. Raises ConfigError.

    The keys of `erased` tenants are not valid, nor those of a tenant whose objects lie in another pool than
    `pool_id`; `not_served` gets the reason. `verbs_provider`: where `section.rdma` is set; `enclosures`: see
    `S3Rdma`. `is_shared`: readers listen as well.
    """
    keys: list[AccessKey] = []
    stores: dict[str, ObjectStore] = {}
    try:
        for tenant in section.tenants:
            if tenant.tenant in erased:
                log.info("the S3 door does without tenant %s, which was erased", tenant.tenant)
                continue
            own = read_credentials_file(tenant.credentials, tenant.tenant)
            if {key.key_id for key in own} & {key.key_id for key in keys}:
                raise ConfigError(
                    f"{tenant.credentials} has an access key that another tenant has", "make another key"
                )
            identity = tenant_id(tenant.tenant)
            blocks = [
                volume
                for volume in in_sets(volumes)
                if volume.settings.kind == "files" and volume.settings.tenant == bytes.fromhex(identity)
            ]
            if not blocks:
                raise ConfigError(
                    f"s3.tenants names {tenant.tenant}, which has no volume of kind `files` in this pool",
                    "objects lie in such volumes; see g35 tenant list",
                )
            state.mkdir(parents=True, exist_ok=True, mode=0o700)
            names = state / f"s3-{identity}.sqlite"
            if not names.exists():
                os.close(os.open(names, os.O_CREAT | os.O_CLOEXEC, 0o600))
            metadata = state / f"s3-{identity}.files.sqlite"
            held, home = store_for(metadata, pool_id, blocks, channel)
            try:
                stores[tenant.tenant] = ObjectStore(
                    names, metadata, held, options, home, partial(_is_erased, blocks), section.names_max
                )
            except NamesElsewhere as elsewhere:
                log.error("the S3 door does without tenant %s: %s", tenant.tenant, elsewhere)
                if not_served is not None:
                    not_served[f"S3 of tenant {tenant.tenant}"] = f"{elsewhere}; {elsewhere.advice}"
                continue
            keys += own
        engine = _engine(section, verbs_provider)
        try:
            return S3Door(section, keys, stores, make_runner, bounds, engine, enclosures, is_shared=is_shared)
        except BaseException:
            if engine is not None:
                engine.close()
            raise
    except BaseException:
        for store in stores.values():
            store.close()
        raise


def _engine(section: S3Section, verbs_provider: str) -> TransferEngine | None:
    """What moves objects by RDMA; None where it is not asked for. Raises ConfigError."""
    if not section.rdma:
        return None
    tenants = len(section.tenants)
    try:
        return TransferEngine(
            verbs_provider,
            section.rdma,
            max(section.transfers, tenants),
            max(section.rdma_connections, tenants),
        )
    except NvmeofError as refused:
        raise ConfigError(
            f"s3.rdma: {refused}",
            "it is the address of an RDMA device of this machine; see fabric.verbs_provider and g35 doctor",
        ) from None


def _is_erased(volumes: Sequence[Volume]) -> bool:
    return any(volume.erased for volume in volumes)
