"""How long each read and write of a simulated drive takes: drives and links with rates, and one worker's
channel to them. Values have lengths and no contents.

A block of 4 KiB (a directory, or a slot's header) is kept, without the zeros at its end; the bytes of a value
behind its header only cross the links. A read or write takes effect when its last byte has been carried.

A block of a model that is too large for one value is striped over several. The agent's code runs for the
first of them; the others' bytes cross the links of other drives beside it (`stripe`).
"""

import mmap
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agent.inline.scatter import Buffer
from agent.pool.steps import Pending
from agent.remote.circuit_breaker import NOT_ANSWERING, Health, Outstanding
from agent.sim.fabric import Fabric, link_of
from agent.sim.links import QueueLink, SharedLink
from agent.sim.pod_plan import PodPlan
from agent.sim.timed_channel import TimedChannel, TimedPending
from agent.sim.virtual_time import Task, VirtualLoop

BLOCK = 4096
SMALL_BYTES = 2 * BLOCK
"""What is no larger pays latency and its time at the drive, and takes no share of a NIC."""
TAIL_SHARE = 0.01
_PROOF = 16
_ZEROS = bytes(BLOCK)
_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux: pages that nobody touches take no memory, and are not promised any."""


def unreserved(size: int) -> memoryview:
    """Memory that is zero and takes room only where it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return memoryview(mmap.mmap(-1, size, flags=flags))


@dataclass(slots=True, eq=False)
class RatedDrive:
    """One namespace: its blocks, its link, and the faults that are set from outside."""

    number: int
    enclosure: int
    link: QueueLink
    blocks: dict[int, bytes] = field(default_factory=dict)
    down: bool = False
    hung: bool = False
    erring: float = 0.0
    waiting: list[Callable[[], None]] = field(default_factory=list)
    bytes_read: int = 0
    bytes_written: int = 0
    keys: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    """Of a KV namespace: the first block of each key's value, as it is kept, and the value's bytes."""
    key_bytes: int = 0
    key_room: int = 0

    def begin(self, plan: PodPlan, now: float, size: int, *, write: bool) -> float:
        """When bytes of values that come now will have been read or written."""
        if not write:
            self.bytes_read += size
            return self.link.begin(now, size)
        self.bytes_written += size
        # A write takes longer at the drive: counted as so many bytes more of its one link.
        return self.link.begin(now, int(size * (plan.drive_read / plan.drive_write)))

    def load(self, offset: int, into: memoryview) -> None:
        """Copy the block at `offset`, or zeros."""
        kept = self.blocks.get(offset)
        if kept is None:
            into[:BLOCK] = _ZEROS
        else:
            unpack_into(kept, into[:BLOCK])

    def store(self, offset: int, packed: bytes) -> None:
        self.blocks[offset] = packed

    def lose_all(self) -> None:
        """A blank drive takes its place."""
        self.blocks.clear()
        self.keys.clear()
        self.key_bytes = 0


def packed(block: bytes) -> bytes:
    """A block as it is kept: its last bytes (a proof, where it is a header), then what is not zero."""
    return block[-_PROOF:] + block[:-_PROOF].rstrip(b"\0")


def unpack_into(kept: bytes, into: memoryview) -> None:
    """The block again, of which `kept` is what `packed` made."""
    into[:] = kept[_PROOF:].ljust(len(into) - _PROOF, b"\0") + kept[:_PROOF]


def last_of(count: int, ended: Callable[[], None]) -> Callable[[], None]:
    """What is called so often, and calls `ended` the last time."""

    def one() -> None:
        nonlocal count
        count -= 1
        if not count:
            ended()

    return one


class FlashPending(TimedPending):
    """`size`: all its bytes, of a write too."""

    __slots__ = ("waiter",)

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.waiter: Task | None = None


@dataclass(slots=True, eq=False)
class HostLinks:
    """The links of one host, each way by itself."""

    nic_in: SharedLink
    nic_out: SharedLink
    to_gpu: SharedLink
    own_disks: QueueLink
    leaf: int = 0
    """Of the fabric, where there is one."""


@dataclass(slots=True)
class Durations:
    """How long things took: how many, seconds in all, and the longest."""

    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def timed(self, loop: VirtualLoop, ended: Callable[[], None]) -> Callable[[], None]:
        """`ended`, and what takes the time from now until it is called."""
        began = loop.now

        def end() -> None:
            took = loop.now - began
            self.count += 1
            self.seconds += took
            self.longest = max(self.longest, took)
            ended()

        return end


class RatedFlash:
    """All drives, enclosures and hosts' links of a pod."""

    def __init__(self, loop: VirtualLoop, plan: PodPlan, seed: object, stripe: int) -> None:
        self.loop = loop
        self.plan = plan
        self.stripe = stripe
        self._dice = random.Random(f"rated flash {seed}")
        self.drives = [
            RatedDrive(number, number // plan.drives, QueueLink(plan.drive_read, plan.drive_latency))
            for number in range(plan.enclosures * plan.drives)
        ]
        self.fabric = Fabric(loop, plan, seed, self.carry) if plan.fabric != "none" else None
        self.enclosures_out = [link_of(plan, plan.enclosure_nic) for _ in range(plan.enclosures)]
        self.enclosures_in = [link_of(plan, plan.enclosure_nic) for _ in range(plan.enclosures)]
        pcie = plan.gpu_pcie * plan.gpus_per_host
        self.hosts = [
            HostLinks(
                link_of(plan, plan.host_nic), link_of(plan, plan.host_nic),
                SharedLink(pcie), QueueLink(plan.g3_rate, plan.drive_latency), number // plan.hosts_per_leaf,
            )
            for number in range(plan.hosts)
        ]  # fmt: skip
        self.g4 = SharedLink(plan.g4_rate or 1.0)
        self.small_bytes = 0
        self.moves = Durations()
        """Of values between drives and hosts, where there is a fabric."""

    # -- links ------------------------------------------------------------------------------------

    def carry(self, link: SharedLink, size: int, ended: Callable[[], None]) -> None:
        """Begin a transfer on a shared link."""
        link.begin(self.loop.now, size, ended)
        self._plan(link)

    def carry_g4(self, host: HostLinks, size: int, ended: Callable[[], None], *, write: bool) -> None:
        """A transfer between shared storage and a host; `ended` when both links have carried it."""
        leg = last_of(2, ended)
        self.carry(self.g4, size, leg)
        self.carry(host.nic_out if write else host.nic_in, size, leg)

    def _plan(self, link: SharedLink) -> None:
        at = link.next_end()
        if at < link.planned_at:
            link.planned_at = at
            self.loop.call_at(at, self._due, link, at)

    def _due(self, link: SharedLink, planned: float) -> None:
        if planned == link.planned_at:
            link.planned_at = float("inf")
            link.end_due(self.loop.now)
            self._plan(link)

    def move(
        self,
        drive: RatedDrive,
        size: int,
        host: HostLinks,
        *,
        write: bool,
        ended: Callable[[], None],
        flow: int = 0,
    ) -> None:
        """A transfer between a drive and a host; `ended` when its last link has carried it. `flow`: of the
        host's connections, by which the fabric may choose a way."""
        now, plan, fabric = self.loop.now, self.plan, self.fabric
        side, nic = (self.enclosures_in, host.nic_out) if write else (self.enclosures_out, host.nic_in)
        latency = plan.network_latency
        if fabric is not None:  # only then links have queues
            latency += side[drive.enclosure].wait() + nic.wait()
        if self._dice.random() < TAIL_SHARE:
            latency += self._dice.random() * plan.drive_tail
        if size <= SMALL_BYTES:
            self.small_bytes += size
            if fabric is not None:
                latency += fabric.wait_of(host.leaf, drive.enclosure, flow, write=write)
            self.loop.call_at(drive.link.begin(now, size) + latency, ended)
            return
        last, late = now, 0.0
        legs: list[tuple[SharedLink, int]] = []
        for number in range(self.stripe):
            of = drive if not number else self.drives[self._other(drive.number, number)]
            last = max(last, of.begin(plan, now, size, write=write))
            legs.append((side[of.enclosure], size))
            if fabric is not None:
                way = fabric.way_of(host.leaf, of.enclosure, flow, size, write=write)
                legs += [(link, way.size) for link in way.links]
                late = max(late, way.latency)
        whole = size * self.stripe
        if fabric is not None:
            ended = self.moves.timed(self.loop, ended)
        legs.append((nic, whole))
        leg = last_of(len(legs) + 1, ended)
        for link, carried in legs:
            self.carry(link, carried, leg)
        self.loop.call_at(last + latency + late, leg)

    def _other(self, number: int, which: int) -> int:
        """Where another value of the stripe lies: as good as any, and the same each time."""
        mixed = (number * 0x9E3779B1 + which * 0x85EBCA6B) & 0xFFFFFFFF
        return (mixed ^ mixed >> 15) % len(self.drives)

    # -- faults of drives -------------------------------------------------------------------------

    def drives_of(self, enclosure: int) -> list[RatedDrive]:
        return self.drives[enclosure * self.plan.drives : (enclosure + 1) * self.plan.drives]

    def errs(self, drive: RatedDrive) -> bool:
        return drive.erring > 0 and self._dice.random() < drive.erring

    def wake(self, drives: Sequence[RatedDrive]) -> None:
        """Enclosures that were stopped go on: what waited there is done now, late."""
        for drive in drives:
            drive.hung = False
            waiting, drive.waiting = drive.waiting, []
            for action in waiting:
                self.loop.call_at(self.loop.now, action)


P = TypeVar("P", bound=FlashPending)


class RatedChannel(TimedChannel):
    """One worker's channel over the links of its host."""

    def __init__(
        self,
        flash: RatedFlash,
        host: HostLinks,
        health: Sequence[Health],
        buffer_bytes: int,
        flow: int = 0,
    ) -> None:
        super().__init__(flash.loop)
        self._flash = flash
        self._host = host
        self._flow = flow
        self._health = health
        self._buffer_bytes = buffer_bytes
        self._receiving: memoryview | None = None
        self._sending: memoryview | None = None
        self._gone = False

    def receive_buffer(self, size: int) -> memoryview:
        if self._receiving is None or len(self._receiving) < size:
            self._receiving = unreserved(max(size, self._buffer_bytes))
        return self._receiving[:size]

    def send_buffer(self, size: int) -> memoryview:
        if self._sending is None or len(self._sending) < size:
            self._sending = unreserved(max(size, self._buffer_bytes))
        return self._sending[:size]

    def read(self, namespace: int, offset: int, into: memoryview, *, more: bool = False) -> FlashPending:
        def load(drive: RatedDrive, pending: FlashPending) -> None:
            if not pending.abandoned:
                drive.load(offset, into)

        return self.begin(namespace, FlashPending(len(into)), load)

    def write(
        self, namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False
    ) -> FlashPending:
        head = packed(bytes(memoryview(parts[0])[:BLOCK]))

        def store(drive: RatedDrive, pending: FlashPending) -> None:
            # What an agent sent before it was killed lands all the same.
            drive.store(offset, head)

        return self.begin(namespace, FlashPending(sum(map(len, parts))), store, write=True)

    def flush(self, namespace: int) -> FlashPending:
        pending = FlashPending(0)
        pending.done = True
        return pending

    def begin(
        self, namespace: int, pending: P, effect: Callable[[RatedDrive, P], None], *, write: bool = False
    ) -> P:
        """Carry so many bytes as the pending has, and then have the effect; a drive that may not be asked
        fails it."""
        drive, health = self._flash.drives[namespace], self._health[namespace]
        lost = drive.down or self._gone
        if lost or not health.may_ask(self._flash.loop.now):
            pending.done = pending.unreachable = True
            pending.fault = "no way there" if lost else NOT_ANSWERING
            return pending
        pending.asked = Outstanding(health, self._flash.loop.now, is_read=not write)
        ended = _End(self, drive, pending, effect)
        self._flash.move(drive, pending.size, self._host, write=write, ended=ended, flow=self._flow)
        return pending

    def end(self, drive: RatedDrive, pending: FlashPending) -> None:
        """The last byte has been carried: answer, unless nobody waits."""
        if pending.abandoned or self._gone:
            return
        failed = True
        if drive.down:
            pending.fault, pending.unreachable = "the connection is gone", True
        elif self._flash.errs(drive):
            pending.fault = "Unrecovered Read Error"
        else:
            # That a key is not there, or is, is an answer as good as any.
            failed = False
            pending.received = 0 if pending.fault is not None else pending.size
        pending.done = True
        assert pending.asked is not None
        pending.asked.answered(self._flash.loop.now, failed=failed, lost=pending.unreachable)
        self._flash.loop.came(pending)

    def abandon(self, pending: Pending) -> None:
        assert isinstance(pending, FlashPending)
        if not pending.done:
            if pending.asked is not None:
                pending.asked.given_up(self._flash.loop.now)
            pending.abandoned = pending.done = True
            pending.fault, pending.waiter = "abandoned", None

    def crash(self) -> None:
        """The agent is gone, and hears of nothing any more."""
        self._gone = True

    def trusts(self, namespace: int) -> bool:
        return self._health[namespace].trusted


class _End:
    """What happens when the last byte of a command has been carried: its effect on the drive, and the answer.

    An object and no nested function: one that names itself is a cycle, which keeps its buffer until the
    garbage collector comes by.
    """

    __slots__ = ("_channel", "_drive", "_effect", "_pending")

    def __init__(
        self,
        channel: RatedChannel,
        drive: RatedDrive,
        pending: FlashPending,
        effect: Callable[[RatedDrive, Any], None],
    ) -> None:
        self._channel, self._drive = channel, drive
        self._pending, self._effect = pending, effect

    def __call__(self) -> None:
        drive = self._drive
        if drive.hung:
            drive.waiting.append(self)
            return
        if not drive.down:
            self._effect(drive, self._pending)
        self._channel.end(drive, self._pending)
