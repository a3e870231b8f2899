"""Processor time of our path over that of the work which no design can leave out (work_floors.py).

Both are of the same round: first the path, four threads that get or put, then each part of the floor alone.
The path's time is that of all its processes: the client that asks, the agent, the enclosure.

A mount costs more than the copy that the floor has of it: pages are looked up one by one, and processes are
woken. So where a value crosses one, the record has `mount_us`, and `times_with_mount`: the path's time over a
floor with the whole of it in the place of the copy.
"""

from collections.abc import Callable, Mapping, Sequence

from agent.bench.meter import ProcessMeter
from agent.bench.names_and_units import Entry
from agent.bench.pool_probes import PUT_BYTES, GetProbe, PutProbe, shape_for, values_got
from agent.bench.redis_pipelines import PIPELINED
from agent.bench.rounds import Sample, metered
from agent.bench.sites import Sites
from agent.bench.work_floors import CipherPart, CopyPart, DatagramPart, MountPart, Part, StreamPart
from agent.errors import G35Error

PoolPath = GetProbe | PutProbe
Paths = Mapping[str, Callable[[Sites, int], tuple[PoolPath, Sequence[Part]]]]


def _get(sites: Sites, size: int) -> tuple[PoolPath, Sequence[Part]]:
    stream = StreamPart(sites, size, 1, from_bytes=values_got(size) * size)
    mount = MountPart(sites, size, reads=True)
    return GetProbe(sites, shape_for(size)), (stream, CipherPart(size, opens=True), CopyPart(size), mount)


def _put(sites: Sites, size: int) -> tuple[PoolPath, Sequence[Part]]:
    stream = StreamPart(sites, size, 1, into_bytes=PUT_BYTES)
    mount = MountPart(sites, size, reads=False)
    return PutProbe(sites, shape_for(size)), (CopyPart(size), CipherPart(size, opens=False), stream, mount)


def _get_registered(sites: Sites, size: int) -> tuple[PoolPath, Sequence[Part]]:
    """Into registered memory, a key a call: without a copy by the kernel."""
    probe = GetProbe(sites, shape_for(size), batch=1, registered=True)
    stream = StreamPart(sites, size, 1, from_bytes=values_got(size) * size)
    return probe, (stream, CipherPart(size, opens=True))


def _put_registered(sites: Sites, size: int) -> tuple[PoolPath, Sequence[Part]]:
    probe = PutProbe(sites, shape_for(size), batch=1, registered=True)
    stream = StreamPart(sites, size, 1, into_bytes=PUT_BYTES)
    return probe, (CipherPart(size, opens=False), stream)


def _get_batch(sites: Sites, size: int) -> tuple[PoolPath, Sequence[Part]]:
    """Into registered memory, which the cipher writes to: without a copy by the kernel."""
    probe = GetProbe(sites, shape_for(size), batch=PIPELINED, registered=True)
    stream = StreamPart(sites, PIPELINED * size, PIPELINED, from_bytes=values_got(size) * size)
    return probe, (stream, CipherPart(size, opens=True))


def _rdma_get(sites: Sites, size: int) -> tuple[PoolPath, Sequence[Part]]:
    probe = GetProbe(sites, shape_for(size, transport="rdma"))
    return probe, (DatagramPart(size), CipherPart(size, opens=True), CopyPart(size))


PATHS: Paths = {
    "get": _get,
    "put": _put,
    "get_registered": _get_registered,
    "put_registered": _put_registered,
    "get_batch": _get_batch,
    "rdma_get": _rdma_get,
}
"""By the second word of `Entry.kind`, behind "over_floor "."""


class OverFloorProbe:
    """Its value is how many times the floor's processor time the path takes."""

    def __init__(self, sites: Sites, entry: Entry) -> None:
        self._sites, self._bytes = sites, entry.value_bytes
        self._path, self._parts = PATHS[entry.kind.removeprefix("over_floor ")](sites, entry.value_bytes)

    def prepare(self) -> None:
        self._path.prepare()
        for part in self._parts:
            part.prepare()

    def round(self, seconds: float) -> Sample:
        meter = ProcessMeter(self._sites.pool(self._path.shape).processes())
        with metered(meter):
            ran = self._path.round(seconds / 2)
        if not ran.bytes:
            raise G35Error("no value was moved, so its processor time is not known")
        values = ran.bytes / self._bytes
        path = {name: spent * 1e6 / values for name, spent in meter.spent.items()}
        floor: dict[str, float] = {}
        for part in self._parts:
            floor |= part.measure(seconds / 2 / len(self._parts))
        mount = floor.pop("mount", None)
        whole, least = sum(path.values()), sum(floor.values())
        parts = {f"{name}_us": taken for name, taken in (*path.items(), *floor.items())}
        parts |= {"path_us": whole, "floor_us": least}
        if mount is not None:
            parts |= {"mount_us": mount, "times_with_mount": whole / (least - floor["copy"] + mount)}
        return Sample(whole / least, ran.operations, ran.bytes, ran.seconds, parts=parts)
