"""The bdev_* methods: names for the enclosure's block drives.

A drive of `--drives`, or from the control socket, is a bdev called `drive-N`. KV drives are not shown.
"""

import errno
import os
import stat
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from emulator.jbof.drive import Drive
from emulator.jbof.enclosure import Enclosure
from emulator.jbof.medium import FileMedium, Medium, MemoryMedium, NullMedium
from emulator.jbof.rpc import parameters
from emulator.jbof.rpc.faults import no_device, of_errno

BDEVS_MAX: Final = 1024
MALLOC_BYTES_MAX: Final = 1 << 42
"""Of one malloc bdev. Memory is taken as it is written."""

_BLOCK_SIZES: Final = (512, 4096)
_PRODUCTS: Final = {"malloc": "Malloc disk", "null": "Null disk", "aio": "AIO disk"}


@dataclass(frozen=True, slots=True)
class Bdev:
    """A name for a drive."""

    name: str
    kind: str
    drive: Drive
    uuid: uuid.UUID
    filename: str | None = None


class Bdevs:
    """The bdevs of one enclosure. Called with the lock of the dispatcher held."""

    def __init__(self, enclosure: Enclosure) -> None:
        self._enclosure = enclosure
        self._made: dict[str, Bdev] = {}

    def all(self) -> dict[str, Bdev]:
        """Every bdev by its name; bdevs of the RPC first."""
        mine = {each.drive.number for each in self._made.values()}
        found = dict(self._made)
        for drive in self._enclosure.drives:
            if isinstance(drive, Drive) and drive.number not in mine:
                name = f"drive-{drive.number}"
                path = str(drive.medium.path) if isinstance(drive.medium, FileMedium) else None
                bdev = Bdev(name, "aio" if path else "malloc", drive, uuid.UUID(bytes=drive.nguid), path)
                found.setdefault(name, bdev)
        return found

    def find(self, name: str) -> Bdev:
        """By its name or its UUID. RpcFault -19."""
        everything = self.all()
        if name in everything:
            return everything[name]
        for each in everything.values():
            if str(each.uuid) == name:
                return each
        raise no_device()

    def create_malloc(self, asked: parameters.CreateMalloc) -> str:
        """bdev_malloc_create: the name."""
        name = asked.name
        if name is None:
            name = next(each for n in range(BDEVS_MAX + 1) if (each := f"Malloc{n}") not in self.all())
        return self._create(name, "malloc", MemoryMedium, asked)

    def create_null(self, asked: parameters.CreateNull) -> str:
        """bdev_null_create: the name."""
        return self._create(asked.name, "null", NullMedium, asked)

    def _create(
        self,
        name: str,
        kind: str,
        make: Callable[[int], Medium],
        asked: parameters.CreateMalloc | parameters.CreateNull,
    ) -> str:
        size = asked.block_size * asked.num_blocks
        if asked.block_size not in _BLOCK_SIZES or not 0 < size <= MALLOC_BYTES_MAX:
            raise of_errno(errno.EINVAL)
        identity = self._identity(name, asked.uuid)
        try:
            medium = make(size)
        except (OSError, ValueError, OverflowError):
            raise of_errno(errno.ENOMEM) from None
        return self._take(name, kind, medium, identity, asked.block_size, None)

    def create_aio(self, asked: parameters.CreateAio) -> str:
        """bdev_aio_create: the name."""
        identity = self._identity(asked.name, asked.uuid)
        try:
            found = os.stat(asked.filename)
            # A file has no block size of its own. This enclosure does not serve block devices.
            is_file = stat.S_ISREG(found.st_mode) and asked.block_size in _BLOCK_SIZES
            if not is_file or found.st_size == 0 or found.st_size % asked.block_size:
                raise of_errno(errno.EINVAL)
            medium = FileMedium(Path(asked.filename), found.st_size)
        except (OSError, ValueError) as error:
            raise of_errno(getattr(error, "errno", 0) or errno.EINVAL) from None
        return self._take(asked.name, "aio", medium, identity, asked.block_size, asked.filename)

    def _identity(self, name: str, given: str | None) -> uuid.UUID:
        """The UUID of a new bdev. Errors of the name come first."""
        everything = self.all()
        if not name or len(everything) >= BDEVS_MAX:
            raise of_errno(errno.EINVAL if not name else errno.ENOMEM)
        if name in everything:
            raise of_errno(errno.EEXIST)
        if given is None:
            # The same each time, so that a namespace without an NGUID keeps its identity.
            return uuid.uuid5(uuid.NAMESPACE_URL, f"{self._enclosure.settings.subsystem_nqn}/{name!a}")
        try:
            wanted = uuid.UUID(given)
        except ValueError:
            raise of_errno(errno.EINVAL) from None
        if any(each.uuid == wanted for each in everything.values()):
            raise of_errno(errno.EEXIST)
        if not wanted.int:
            raise of_errno(errno.EINVAL)
        return wanted

    def _take(
        self,
        name: str,
        kind: str,
        medium: Medium,
        identity: uuid.UUID,
        block_size: int,
        filename: str | None,
    ) -> str:
        try:
            drive = self._enclosure.take_drive(medium, identity.bytes, block_size)
        except ValueError:
            medium.close()
            raise of_errno(errno.ENOMEM) from None
        self._made[name] = Bdev(name, kind, drive, identity, filename)
        return name

    def delete(self, kind: str, name: str) -> bool:
        """bdev_malloc_delete and bdev_aio_delete; namespaces on it go with it."""
        bdev = self.find(name)
        if bdev.kind != kind:
            raise no_device()
        self._made.pop(bdev.name, None)
        self._enclosure.discard_drive(bdev.drive.number)
        return True

    def get(self, asked: parameters.GetBdevs) -> list[dict[str, Any]]:
        chosen = list(self.all().values()) if asked.name is None else [self.find(asked.name)]
        return [self._describe(each) for each in chosen]

    def _describe(self, bdev: Bdev) -> dict[str, Any]:
        drive = bdev.drive
        specific: dict[str, Any] = {}
        if bdev.filename is not None:
            specific["aio"] = {"filename": bdev.filename, "block_size_override": True, "readonly": False}
        return {
            "name": bdev.name,
            "aliases": [str(bdev.uuid)],
            "product_name": _PRODUCTS[bdev.kind],
            "block_size": drive.lba_bytes,
            "num_blocks": drive.block_count,
            "uuid": str(bdev.uuid),
            "claimed": self._enclosure.is_attached(drive.number),
            "zoned": False,
            "supported_io_types": {
                "read": True, "write": True, "unmap": True, "flush": True, "write_zeroes": True,
                "compare": True, "reset": False, "nvme_admin": False, "nvme_io": False, "abort": True,
            },
            "driver_specific": specific,
        }  # fmt: skip

    def iostat(self, asked: parameters.GetIostat) -> dict[str, Any]:
        """bdev_get_iostat. Latencies are not measured and stay 0."""
        chosen = self.all().values() if asked.names is None else map(self.find, asked.names)
        return {
            "tick_rate": 1_000_000_000,
            "ticks": time.monotonic_ns(),
            "bdevs": [_counters(each) for each in chosen],
        }


def _counters(bdev: Bdev) -> dict[str, Any]:
    said = bdev.drive.stats()
    failed = said["failed_commands"]
    return {
        "name": bdev.name,
        "bytes_read": said["read_bytes"],
        "num_read_ops": said["read_commands"],
        "bytes_written": said["write_bytes"],
        "num_write_ops": said["write_commands"],
        "bytes_unmapped": said["deallocate_bytes"],
        "num_unmap_ops": said["deallocate_commands"],
        "bytes_copied": 0,
        "num_copy_ops": 0,
        "read_latency_ticks": 0,
        "write_latency_ticks": 0,
        "unmap_latency_ticks": 0,
        "io_error": {"failed": failed} if failed else {},
    }
