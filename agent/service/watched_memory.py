"""Tables that requests fill and that keep their bounds by themselves: each drops its oldest, or refuses. They
are shown among the bounds; nothing is counted here.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Final

from agent.fs.control.registered_memory import RegisteredMemory
from agent.fs.files.fsync_tracking import BLOCKS_MAX
from agent.fs.files.pool_store import OPEN_BLOCKS_MAX, PoolBlockStore
from agent.host_os.per_user_bounds import ALL, Bound, Bounds, Limit
from agent.pool.format.header_cache import KEPT_MAX
from agent.pool.kv.volume import REMEMBERED_KEYS
from agent.pool.prestage.predictor import ENTRIES_MAX
from agent.pool.prestage.staging_queue import GUESSES_MAX, WAITING_MAX
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.eviction_holds import HELD_KEYS
from agent.pool.volume.in_doubt_writes import KEYS_MAX
from agent.pool.volume.media_errors import REPORTS_MAX, SUSPECTS_MAX
from agent.pool.volume.puts_in_pieces import BEGUN_BYTES
from agent.pool.volume.removed_marks import KEYS_MAX as REMOVED_MAX
from agent.pool.volume.replication_backlog import DOUBTFUL_MAX, OWED_MAX
from agent.pool.volume.spill_copies import COPIES_MAX, SETS_MAX
from agent.pool.volume.unit_buffers import KEPT_UNITS_MAX, SPARE_MAX
from agent.pool.volume.volume import PoolVolume
from agent.pool.write.admission import SEEN_MAX
from agent.remote.fence import MOST_PLACES, Fence
from agent.service.volume_policies import VolumePolicies
from agent.spill.read_up import RETURNS_MAX
from agent.spill.read_up import SEEN_MAX as UPS_MAX

OLDEST: Final = "the oldest goes"


def _limit(name: str, counts: str, most: int, refused: str, bytes_each: int, by: str = "everybody") -> Limit:
    return Limit(name, counts, most, by=by, share=ALL, refused=refused, bytes_each=bytes_each)


_of_volume: Final = functools.partial(_limit, by="volume")


# fmt: off
DIRECTORIES: Final = _limit(
    "directories", "remembered directories (`directory_cache` / 5 KiB)", 13_107,
    "the oldest that nobody uses goes", 8192,
)
PRESTAGED: Final = _limit(
    "prestaged-bytes", "bytes of values that were prestaged (`[prestage] memory`)", 256 << 20, OLDEST, 0,
)
ANNOUNCED: Final = _limit(
    "prestage-keys", "keys that are to be prestaged, guesses among them", WAITING_MAX + GUESSES_MAX,
    "refused, or the oldest guess goes", 1024,
)
LEARNED: Final = _limit("learned-keys", "keys whose successors are known", ENTRIES_MAX, OLDEST, 2048)
REGISTERED: Final = _limit(
    "registered-bytes", "bytes of clients' memory that are mapped (`registered_memory`)", 64 << 30,
    "ENOSPC", 0, "session",
)
FENCED: Final = _limit(
    "fenced-places", "places where a write without an answer may land", MOST_PLACES,
    "the whole namespace is fenced", 2048,
)
BEGUN: Final = _limit(
    "begun-bytes", "bytes of values that came in part and wait for their next piece", BEGUN_BYTES,
    "one that has waited for 1 s goes, or one of the volume that holds most, or EIO", 0,
)
BACK: Final = _limit(
    "write-back-bytes", "bytes of values that wait to be stored (`write_back_memory`)", 64 << 20,
    "stored before the answer", 0, "volume",
)
SECOND_USE: Final = _limit(
    "second-use-keys", "keys that were put before", SEEN_MAX, "the older half goes", 256,
)
FILE_BLOCKS: Final = _limit(
    "file-blocks", "blocks of files that were read lately, or that no flush has proven",
    OPEN_BLOCKS_MAX + 2 * BLOCKS_MAX, "a put flushes; the oldest goes", 16384,
)
OF_VOLUMES: Final = {limit.name: limit for limit in (
    _of_volume("kept-units", "opened units whose rest is not read yet", KEPT_UNITS_MAX, OLDEST, 2 << 20),
    _of_volume("spare-units", "buffers that wait for their next use", SPARE_MAX, "it is freed", 2 << 20),
    _of_volume("proven-headers", "headers of slots that need no second proof", KEPT_MAX, OLDEST, 16384),
    _of_volume("unsettled-keys", "keys of which a write may still land", KEYS_MAX,
               "none of its keys is deleted for 60 s", 256),
    _of_volume("kv-keys", "keys on KV namespaces that were used, evicted or disproven", 3 * REMEMBERED_KEYS,
               OLDEST, 512),
    _of_volume("damaged-slots", "slots with strikes, and reports that wait", SUSPECTS_MAX + REPORTS_MAX,
               OLDEST, 512),
    _of_volume("owed-copies", "second copies that are to be made, or taken back", OWED_MAX + DOUBTFUL_MAX,
               "left to a scrub; none is made", 512),
    _of_volume("spill-copies", "values on flash that have a copy in G4, and sets that wait for one",
               COPIES_MAX + SETS_MAX, OLDEST, 1024),
    _of_volume("spill-uses", "keys that came up from G4 once, and values that go back to flash",
               UPS_MAX + RETURNS_MAX, OLDEST, 512),
    _of_volume("removed-marks", "keys whose marks in G4 were taken out within the last minute", REMOVED_MAX,
               OLDEST, 3072),
)}
# fmt: on


def watch_memory(
    bounds: Bounds,
    policies: VolumePolicies,
    directories: DirectoryCache,
    registered: RegisteredMemory,
    registered_max: int,
    fence: Fence,
) -> None:
    """Show what they hold. `registered_max`: bytes."""
    served, prestage = policies.served, policies.prestage
    bounds.watch(DIRECTORIES, lambda: {"all": len(directories)}, most=directories.capacity)
    bounds.watch(PRESTAGED, lambda: {"all": prestage.bytes_held}, most=prestage.budget_bytes)
    bounds.watch(ANNOUNCED, lambda: {"all": len(policies.prefetcher)})
    bounds.watch(LEARNED, lambda: {"all": len(policies.readahead)})
    bounds.watch(REGISTERED, lambda: {"all": registered.mapped_bytes()}, most=registered_max)
    bounds.watch(FENCED, lambda: {"all": len(fence)})
    volumes = [each.volume for each in served]
    if volumes:
        puts_in_pieces = volumes[0].puts_in_pieces
        bounds.watch(BEGUN, lambda: {"all": puts_in_pieces.bytes_held}, most=puts_in_pieces.bytes_max)
    for name, limit in OF_VOLUMES.items():
        having = [each for each in volumes if name in each.table_sizes()]
        if having:
            bounds.watch(limit, _counted(having, name), most=limit.most * len(having))
    backs = [each.back for each in served if each.back is not None]
    if backs:
        most = sum(back.bytes_max for back in backs)
        bounds.watch(BACK, lambda: {str(each): back.bytes_held for each, back in enumerate(backs)}, most=most)
    holds = [each.in_sets.holds.bound for each in served if each.in_sets is not None]
    if holds:
        bounds.watch(
            HELD_KEYS,
            _held_by(holds),
            lambda: sum(each.refusals for each in holds),
            HELD_KEYS.most * len(holds),
        )
    seen = [each.admission for each in served if each.admission is not None]
    if seen:
        bounds.watch(SECOND_USE, lambda: {"all": sum(map(len, seen))})


def _counted(volumes: Sequence[PoolVolume], table: str) -> Callable[[], dict[str, int]]:
    return lambda: {str(number): volume.table_sizes()[table] for number, volume in enumerate(volumes)}


def _held_by(bounds: Sequence[Bound]) -> Callable[[], dict[str, int]]:
    """What each holder has of all of them."""

    def held() -> dict[str, int]:
        counts: dict[str, int] = {}
        for bound in bounds:
            for holder, count in bound.by_holder().items():
                counts[str(holder)] = counts.get(str(holder), 0) + count
        return counts

    return held


def watch_blocks(bounds: Bounds, store: PoolBlockStore) -> None:
    """Show what is remembered of the blocks of /fs."""
    bounds.watch(FILE_BLOCKS, lambda: {"all": store.remembered})
