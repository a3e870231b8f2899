"""A shared volume as the face sees it: the chunks of its files, and the manifests under their names.

Both are volumes of the pool (`agent.pool.access.ServedVolume`); the protocols here say which of it the face
uses.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from agent.fs.interface import StatFs
from agent.fs.shared.manifest import HEAD, RUN
from agent.fs.shared.paths import PATH_BYTES_MAX
from agent.host_os.per_user_bounds import Holder
from agent.pool.counters import MissCause
from agent.pool.mutable.look_ahead import Look
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.settings import Timing, VolumeSettings
from agent.pool.write.writer_base import Writer

HELD_AT_ONCE: Final = 4096
"""Keys that one call of `hold` takes."""
RUNS_MAX: Final = 1024


class Reader(Protocol):
    """One chunk being read: agent/pool/read/reader_base.py."""

    cause: MissCause | None

    @property
    def length(self) -> int | None: ...

    def read(self, channel: IoChannel, offset: int, into: memoryview, deadline: float) -> Steps[int]: ...

    def give_up(self, channel: IoChannel, cause: MissCause) -> None: ...

    def close(self) -> None: ...


class Hold(Protocol):
    """Chunks that this agent does not evict: agent/pool/volume/eviction_holds.py."""

    def let_go(self) -> None: ...


class Values(Protocol):
    """Values of the pool: agent/pool/access.py."""

    @property
    def settings(self) -> VolumeSettings: ...

    @property
    def timing(self) -> Timing: ...

    @property
    def erased(self) -> bool: ...

    @property
    def waiting(self) -> int: ...

    def reader(self, key: bytes, prestage: PrestageCache | None = None) -> Reader: ...

    def writer(self, key: bytes, *, length: int | None = None, ttl_seconds: int = 0) -> Writer: ...

    def unnamed_writer(self, key: bytes, *, length: int | None) -> Writer: ...

    def name_all(self, channel: IoChannel, writers: Sequence[Writer], deadline: float) -> Steps[None]: ...

    def lookup(
        self, channel: IoChannel, keys: Sequence[bytes], deadline: float
    ) -> Steps[list[MissCause | None]]: ...

    def delete(self, channel: IoChannel, key: bytes, deadline: float) -> Steps[bool]: ...

    def replace(
        self,
        channel: IoChannel,
        key: bytes,
        data: bytes,
        deadline: float,
        first: Steps[None] | None = None,
        look: Look | None = None,
        only_over: Callable[[bytes | None], bool] | None = None,
    ) -> Steps[bool]: ...

    def knows(self, channel: IoChannel, key: bytes) -> bool: ...

    def look_ahead(self, channel: IoChannel, key: bytes, deadline: float) -> Steps[Look | None]: ...

    def newest(self, channel: IoChannel, key: bytes, deadline: float) -> Steps[bytes | MissCause]: ...

    def hold(
        self, channel: IoChannel, keys: Sequence[bytes], deadline: float, holder: Holder = 0
    ) -> Steps[Hold | MissCause]: ...


@dataclass(frozen=True, slots=True, eq=False)
class SharedVolume:
    """One volume of shared files."""

    name: str
    chunks: Values
    names: Values
    usage: Callable[[], tuple[int, int]]
    """Slots of chunks in all, and those taken."""

    @property
    def erased(self) -> bool:
        return self.chunks.erased or self.names.erased

    @property
    def chunk_bytes(self) -> int:
        return self.chunks.settings.value_bytes

    @property
    def timing(self) -> Timing:
        return self.chunks.timing

    @property
    def path_bytes_max(self) -> int:
        """The longest path that a manifest has room for."""
        return min(PATH_BYTES_MAX, self.names.settings.value_bytes - HEAD.size - RUN.size)

    @property
    def room(self) -> int:
        """Bytes of a manifest beside its head and its path, however long that gets by a rename."""
        return self.names.settings.value_bytes - HEAD.size - self.path_bytes_max

    @property
    def runs_max(self) -> int:
        return min(RUNS_MAX, self.room // RUN.size)

    @property
    def chunks_max(self) -> int:
        """How many chunks the whole volume has room for."""
        return self.usage()[0]


def room_of(volumes: Iterable[SharedVolume]) -> StatFs:
    """What statfs(2) shows of volumes, in blocks of 4 KiB."""
    total = free = 0
    for volume in volumes:
        slots, taken = volume.usage()
        blocks = volume.chunk_bytes // 4096
        total += slots * blocks
        free += (slots - taken) * blocks
    return StatFs(total, free, free)
