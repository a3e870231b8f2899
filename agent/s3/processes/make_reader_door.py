"""The S3 door of a reader from the configuration."""

import logging
import socket
from collections.abc import Callable, Container, Mapping, Sequence

from agent.config.configuration import Configuration
from agent.errors import G35Error
from agent.fs.doors.door import MakeRunner
from agent.fs.files.pool_store import PoolBlockStore
from agent.fs.files.sealed_reads import Blocks
from agent.pool.steps import IoChannel
from agent.pool.volume.volume import Volume
from agent.s3.credentials import AccessKey, read_credentials_file
from agent.s3.processes.reader_door import ReaderDoor
from agent.s3.processes.reader_objects import ANSWER_SECONDS

log = logging.getLogger(__name__)


def make_reader_door(
    configuration: Configuration,
    listen: Sequence[str],
    processes: int,
    sockets: Sequence[socket.socket],
    volumes: Sequence[Volume],
    may_read: Callable[[Volume], bool],
    erased: Container[str],
    channel: Callable[[], IoChannel],
    make_runner: MakeRunner,
) -> ReaderDoor | None:
    """A door at the addresses of the first process, not open yet; None where it cannot be made, which the log
    says. `sockets`: to the first process, the last one for requests that it answers."""
    whole = configuration.s3
    section = whole.model_copy(
        update={
            "listen": tuple(listen),
            "connections": max(1, whole.connections // processes),
            "transfers": max(1, whole.transfers // processes),
        }
    )
    keys: list[AccessKey] = []
    try:
        for tenant in section.tenants:
            if tenant.tenant not in erased:
                keys += read_credentials_file(tenant.credentials, tenant.tenant)
        *links, carrying = sockets
        for link in links:
            link.settimeout(ANSWER_SECONDS)
        blocks = VolumesOfBlocks(volumes, may_read, channel)
        return ReaderDoor(section, keys, links, carrying, blocks.of, make_runner)
    except G35Error as error:
        log.error("this process of the agent serves no S3: %s (%s)", error, error.advice)
        return None


class VolumesOfBlocks:
    """The blocks of the volumes that a reader has. Safe from any thread."""

    def __init__(
        self, volumes: Sequence[Volume], may_read: Callable[[Volume], bool], channel: Callable[[], IoChannel]
    ) -> None:
        self._volumes = {
            volume.settings.volume_id.hex(): volume for volume in volumes if volume.settings.kind == "files"
        }
        self._may_read, self._channel = may_read, channel
        self._stores: dict[tuple[str, ...], PoolBlockStore] = {}

    def of(self, home: Mapping[int, str]) -> Blocks | None:
        """The store of the volumes with these identifiers; None where one is not served here now."""
        names = tuple(home.values())
        volumes = [self._volumes[name] for name in names if name in self._volumes]
        if len(volumes) != len(names) or not all(map(self._may_read, volumes)):
            return None
        # Each tenant has one set of them, so there are few.
        store = self._stores.get(names)
        if store is None:
            store = self._stores[names] = PoolBlockStore(volumes, self._channel)
        return store
