"""KV namespaces in virtual time: latency, hangs, kills, and answers that are damaged, stale, of another key
or cut short.

Read faulty_flash.py first. A Store is all or nothing, as the KV command set has it; whether one that was
given up lands, and when, is chance. What a Retrieve is answered with may be wrong in every way that a
broken enclosure could think of.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agent.inline.scatter import Buffer
from agent.pool.kv.volume import KvVolume, room_of
from agent.pool.steps import Pending
from agent.pool.volume.settings import KvShare, Timing, VolumeSettings
from agent.sim.seeded_scheduler import StepScheduler
from agent.sim.timed_channel import TimedChannel
from nvmeof.wire.kv import encode_key_list
from tests.support.pool.memory_pool import TENANT, VOLUME_ID, fixed_secret, nguid_of

LIES = ("flip", "stale", "swap", "short", "empty", "gone")


@dataclass
class SimKvNamespace:
    """A KV namespace of `capacity` bytes. Faults are set from outside while it runs."""

    capacity: int
    latency: tuple[float, float] = (0.0001, 0.002)
    values: dict[bytes, bytes] = field(default_factory=dict)
    earlier: dict[bytes, bytes] = field(default_factory=dict)
    down: bool = False
    hung: bool = False
    broken: bool = False
    lying: float = 0.0
    """Part of the retrieves that are answered wrongly."""
    losing: float = 0.0
    """Part of the stores that are acknowledged and not done."""
    tainted: bool = False
    """A fault was injected here at some time: what was stored here need not be there."""
    commands: int = 0
    waiting: list[Callable[[], None]] = field(default_factory=list)

    @property
    def used(self) -> int:
        return sum(room_of(len(value)) for value in self.values.values())

    def wake(self, scheduler: StepScheduler) -> None:
        """Everything that waited is served, late."""
        self.hung = False
        for number, action in enumerate(self.waiting):
            scheduler.call_at(scheduler.now + 1e-6 * number, action)
        self.waiting.clear()

    def store(self, key: bytes, value: bytes, *, only_new: bool) -> str:
        """What becomes of a Store: "" it is in, "full", or "present"."""
        if only_new and key in self.values:
            return "present"
        if self.used + room_of(len(value)) > self.capacity:
            return "full"
        if key in self.values:
            self.earlier[key] = self.values[key]
        self.values[key] = value
        return ""

    def answer(self, key: bytes, rng: random.Random) -> bytes | None:
        """What a Retrieve is told."""
        value = self.values.get(key)
        if not self.lying or rng.random() >= self.lying:
            return value
        self.tainted = True
        match rng.choice(LIES):
            case "flip" if value:
                damaged = bytearray(value)
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
                return bytes(damaged)
            case "stale":
                return self.earlier.get(key, value)
            case "swap" if self.values:
                return self.values[rng.choice(sorted(self.values))]
            case "short" if value:
                return value[: rng.randrange(len(value))]
            case "empty":
                return b""
        return None


@dataclass(eq=False)
class KvSimPending:
    """One command on a key under way: agent.pool.kv.commands.KvPending."""

    done: bool = False
    received: int = 0
    fault: str | None = None
    unreachable: bool = False
    missing: bool = False
    full: bool = False
    present: bool = False
    value_bytes: int = 0
    abandoned: bool = False
    land: Callable[[], None] | None = None

    def fail(self, fault: str, *, unreachable: bool = False) -> None:
        if not self.done:
            self.done, self.fault, self.unreachable = True, fault, unreachable


class SimKvChannel(TimedChannel):
    """One worker's channel to KV namespaces; blocks it has none."""

    def __init__(self, scheduler: StepScheduler, namespaces: Sequence[SimKvNamespace], name: str) -> None:
        super().__init__(scheduler)
        self._scheduler = scheduler
        self._namespaces = namespaces
        self._random = random.Random(f"kv lanes {name} {scheduler.random.random()}")
        self._used_at_first = [each.used for each in namespaces]

    # -- commands on keys ---------------------------------------------------------------------------

    def kv_store(
        self, namespace: int, key: bytes, parts: Sequence[Buffer], *, only_new: bool = False
    ) -> KvSimPending:
        target, pending = self._namespaces[namespace], KvSimPending()
        held: list[Buffer] = list(parts)  # taken when it is applied: a buffer used again too early does harm
        state = {"applied": False}

        def apply() -> None:
            if state["applied"]:
                return
            state["applied"] = True
            if self._random.random() < target.losing:
                target.tainted = True
                return
            why = target.store(key, b"".join(bytes(part) for part in held), only_new=only_new)
            if why and not pending.done:
                pending.full, pending.present = why == "full", why == "present"
                pending.fail(why)

        def keep() -> None:
            held[:] = [b"".join(bytes(part) for part in held)]
            if self._random.random() < 0.5:
                apply()

        pending.land = keep
        self._submit(target, pending, apply)
        return pending

    def kv_retrieve(self, namespace: int, key: bytes, into: memoryview) -> KvSimPending:
        target, pending = self._namespaces[namespace], KvSimPending()

        def serve() -> None:
            if pending.done:
                return
            value = target.answer(key, self._random)
            if value is None:
                pending.missing = True
                pending.fail("no such key")
                return
            count = min(len(value), len(into))
            into[:count] = value[:count]
            pending.received, pending.value_bytes = count, len(value)

        self._submit(target, pending, serve)
        return pending

    def kv_delete(self, namespace: int, key: bytes) -> KvSimPending:
        target, pending = self._namespaces[namespace], KvSimPending()

        def remove() -> None:
            if target.values.pop(key, None) is None and not pending.done:
                pending.missing = True
                pending.fail("no such key")

        self._submit(target, pending, remove)
        return pending

    def kv_exists(self, namespace: int, key: bytes) -> KvSimPending:
        target, pending = self._namespaces[namespace], KvSimPending()

        def look() -> None:
            if key not in target.values and not pending.done:
                pending.missing = True
                pending.fail("no such key")

        self._submit(target, pending, look)
        return pending

    def kv_list(self, namespace: int, first: bytes, into: memoryview) -> KvSimPending:
        target, pending = self._namespaces[namespace], KvSimPending()

        def name() -> None:
            if not pending.done:
                into[:] = encode_key_list(sorted(key for key in target.values if key >= first), len(into))

        self._submit(target, pending, name)
        return pending

    def kv_used_bytes(self, namespace: int) -> int:
        return self._used_at_first[namespace]

    def _submit(self, target: SimKvNamespace, pending: KvSimPending, effect: Callable[[], None]) -> None:
        target.commands += 1
        if target.down:
            pending.fail("no way there", unreachable=True)
            return
        total = self._random.uniform(*target.latency)
        begun = {"effect": False}

        def effect_if_up() -> None:
            if target.hung:
                target.waiting.append(effect_if_up)
            elif not target.down and not target.broken:
                begun["effect"] = True
                effect()

        def end_if_up() -> None:
            if target.hung:
                target.waiting.append(end_if_up)
            elif target.down:
                pending.fail("the connection is gone", unreachable=True)
            elif target.broken or not begun["effect"]:
                pending.fail("Unrecovered Error")
            else:
                pending.done = True

        now = self._scheduler.now
        self._scheduler.call_at(now + total * self._random.random(), effect_if_up)
        self._scheduler.call_at(now + total, end_if_up)

    # -- the rest of the channel --------------------------------------------------------------------------

    def read(self, namespace: int, offset: int, into: memoryview, *, more: bool = False) -> Pending:
        raise AssertionError("a KV namespace has no blocks")

    def write(self, namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False) -> Pending:
        raise AssertionError("a KV namespace has no blocks")

    def flush(self, namespace: int) -> Pending:
        return KvSimPending(done=True)

    def abandon(self, pending: Pending) -> None:
        assert isinstance(pending, KvSimPending)
        if not pending.done:
            pending.abandoned = True
            pending.fail("abandoned")
            if pending.land is not None:
                pending.land()

    def unflushed(self, namespace: int) -> int | None:
        return None

    def is_local(self, namespace: int) -> bool:
        return False

    def trusts(self, namespace: int) -> bool:
        return True


def kv_volume(
    capacities: Sequence[int],
    *,
    value_bytes: int = 1 << 17,
    unit_bytes: int = 1 << 16,
    suite: str = "aes-256-gcm",
    ttl_seconds: int = 0,
    timing: Timing | None = None,
) -> KvVolume:
    """A volume with a fixed secret on KV namespaces of these capacities."""
    shares = tuple(KvShare(number, nguid_of(number), size) for number, size in enumerate(capacities))
    settings = VolumeSettings(
        "v", TENANT, VOLUME_ID, "kv", value_bytes, unit_bytes, suite, ttl_seconds, (), shares
    )
    return KvVolume(settings, fixed_secret(), timing or Timing())
