"""The places in G4 of an agent: for each its target, its volumes, and the thread that copies down and up.

A place is made with the agent, and asked for nothing until its thread does: one that hangs or is missing
keeps no flash from serving. Volumes of one copy in sets of slots, of kind `kv`, have a
place; others have none (docs/limits.md)."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple

from agent.config.spill_section import BUNDLE_BYTES_MAX, SpillSection
from agent.errors import ConfigError
from agent.host_os.worker_thread import OwnThread
from agent.inline.crc64 import engine
from agent.pool.maintenance.scrub import Pace
from agent.pool.read.recompute_gate import RecomputeGate
from agent.pool.volume.volume import PoolVolume, Volume, in_sets
from agent.remote.channel import WorkerChannel
from agent.spill.bundle import bytes_wanted
from agent.spill.copy_down import Spiller
from agent.spill.folder import FolderTarget
from agent.spill.read_up import Below, PlaceHealth
from agent.spill.room import Room
from agent.spill.target import Target, TargetError

log = logging.getLogger(__name__)

IDLE_SECONDS: Final = 0.02
"""How long a thread sleeps that found nothing to do; twice as long each time, until there is something."""
IDLE_MOST_SECONDS: Final = 0.25
ERROR_SECONDS: Final = 1.0
LOG_SECONDS: Final = 10.0
"""One error in this time is logged; status has the last."""
SILENT_SECONDS: Final = 10.0
"""A thread that has been at one thing for so long is told of in the status."""
STOP_SECONDS: Final = 10.0
MIB: Final = 1 << 20


def target_of(section: SpillSection, *, wants_room: bool = True) -> Target:
    """The folder or bucket of a section. Raises ConfigError."""
    if section.folder is not None:
        return FolderTarget(section.folder, room_wanted=section.bundle if wants_room else 0)
    assert section.credentials_file is not None
    from agent.spill.s3_target import S3Target  # with XML, for an agent that has its G4 in a bucket

    return S3Target(section.endpoint, section.bucket, section.region, section.credentials_file)


def check_bundles(section: SpillSection, volumes: Sequence[Volume]) -> None:
    """Raises ConfigError where a bundle holds not one slot of a volume."""
    for volume in volumes:
        name, wanted = volume.settings.name, bytes_wanted(volume.settings.slot_bytes)
        if wanted <= section.bundle:
            continue
        bundle = -(-wanted // MIB)
        raise ConfigError(
            f"spill: a bundle of {section.bundle / MIB:g} MiB holds no value of volume {name}, which wants "
            f"{bundle} MiB",
            f'set bundle = "{bundle}M" for {section.name}'
            if bundle * MIB <= BUNDLE_BYTES_MAX
            else f"set volumes for {section.name}, without {name}: no bundle is that long",
        )


def can_spill(volume: Volume) -> bool:
    """Whether a volume's values may go to G4: values that do not change, of which there is one copy."""
    return volume.settings.kind == "kv" and volume.settings.copies == 1


class _Refusal(NamedTuple):
    """What a place does not do for a volume, and when it is asked again."""

    words: str
    again_at: float


class SpillPlace(OwnThread):
    """One place, and the thread that works for it. `take_channel` gives it its channel."""

    def __init__(
        self,
        section: SpillSection,
        pool_id: str,
        volumes: Sequence[Volume],
        gates: Mapping[str, RecomputeGate],
        take_channel: Callable[[], WorkerChannel],
    ) -> None:
        """Raises ConfigError."""
        super().__init__("spill", STOP_SECONDS, f"the thread of spill, which waits for {section.name},")
        check_bundles(section, volumes)
        engine()  # loaded now, for bundles: the first get from there has its deadline
        self._section = section
        self._target = target_of(section)
        self._take_channel = take_channel
        self._error = self._told = ""
        self._tell_at = 0.0
        self._is_fit = False
        self._idle = IDLE_SECONDS
        self._began: float | None = None
        """When the thread began its turn."""
        self.health = PlaceHealth(section.in_flight, section.memory // 2, section.deadline_ms / 1e3)
        self._spillers: list[Spiller] = []
        self._erased: set[str] = set()
        self._refusals: dict[str, _Refusal] = {}
        """By volume; until the place does it."""
        # Each volume fills a bundle of its own; half of the memory is for those.
        fitting = max(1, section.memory // 2 // section.bundle)
        for volume in volumes[:fitting]:
            gate = gates.get(volume.settings.name)
            below = Below(
                volume, pool_id, self._target, self.health, gate.like() if gate is not None else None
            )
            self._spillers.append(
                Spiller(
                    volume,
                    pool_id,
                    self._target,
                    Room(self._target, pool_id, volume.settings.volume_id, section.max_bytes),
                    section.bundle,
                    all_values=section.values == "all",
                    below=below,
                )
            )
            volume.change(below=below, on_erasure=below.forget)
        if len(volumes) > fitting:
            log.warning(
                "spill: %s has memory for the bundles of %d volumes, and %d have it as their place; raise "
                "spill.memory, or the others have none",
                section.name, fitting, len(volumes),
            )  # fmt: skip

    def snapshot(self) -> dict[str, Any]:
        """What `g35 status` and the metrics tell of the place."""
        return {
            "place": self._section.name,
            "error": self._silence(time.monotonic()) or self._error,
            "left_alone": self.health.is_alone(time.monotonic()),
            **asdict(self.health.counts),
            "volumes": {
                each.volume.settings.name: {
                    **asdict(each.counts),
                    "sets_dropped": each.volume.spill_copies.sets_dropped,
                    "copies_on_flash": len(each.volume.spill_copies),
                    "bytes_used": each.room.used,
                    "bytes_max": self._section.max_bytes,
                    "bundles_deleted": each.room.deleted,
                }
                for each in self._spillers
            },
        }

    def _silence(self, now: float) -> str:
        began = self._began
        if began is None or now - began < SILENT_SECONDS:
            return ""
        return f"{self._section.name} has not answered for {now - began:.0f} s"

    def stop(self) -> None:
        super().stop()
        self._target.close()

    def _work(self) -> None:
        channel = self._take_channel()
        pace = Pace(self._section.rate, lambda: 0)
        while not self.stopping.is_set():
            self._began = time.monotonic()
            try:
                wait = self._turn(channel, pace)
            except Exception:
                log.exception("spill: work for %s failed; it is tried again", self._section.name)
                wait = ERROR_SECONDS
            self._error = self._first_error()
            self._tell(time.monotonic())
            self._began = None
            self.stopping.wait(wait)
        for spiller in self._spillers:
            spiller.store(channel.wall())

    def _first_error(self) -> str:
        """What the place does not do now, or why the last bundle of a volume was dropped."""
        for refusal in self._refusals.values():
            return refusal.words
        return next((each.last_error for each in self._spillers if each.last_error), "")

    def _tell(self, now: float) -> None:
        """Log an error, if it is another one than before, and time for one."""
        if not self._error:
            self._told = ""
        if self._error == self._told or now < self._tell_at:
            return
        log.warning(
            "spill: %s: %s; values that are evicted meanwhile are lost", self._section.name, self._error
        )
        self._told, self._tell_at = self._error, now + LOG_SECONDS

    def _turn(self, channel: WorkerChannel, pace: Pace) -> float:
        """One thing for each volume; how long to wait before the next turn."""
        moved, is_idle = 0, True
        for spiller in self._spillers:
            if not self._is_fit:
                # Marks are flash's matter, whatever the place does.
                channel.run(spiller.look_again(channel))
            is_idle = not self._care_for(spiller, channel) and is_idle
            if self._is_fit or spiller.volume.erased:
                count = channel.run(spiller.turn(channel))
                moved += count or 0
                is_idle = is_idle and count is None
        if is_idle and not any(each.memory for each in self._spillers):
            idle, self._idle = self._idle, min(2 * self._idle, IDLE_MOST_SECONDS)
            return idle
        self._idle = IDLE_SECONDS
        if is_idle:
            return IDLE_SECONDS
        return min(ERROR_SECONDS, max(0.0, pace.spend(moved, channel.now())))

    def _care_for(self, spiller: Spiller, channel: WorkerChannel) -> bool:
        """Keep what a volume has there within its room; whether there is more to do. What the place refuses
        to one volume, such as to delete, holds up no other, and is asked for again later."""
        name, room = spiller.volume.settings.name, spiller.room
        refusal = self._refusals.get(name)
        if refusal is not None and channel.now() < refusal.again_at:
            return False
        try:
            if spiller.volume.erased:
                is_over = self._clear(spiller)
            else:
                # Before the check: old bundles of this pool's may be what takes the room.
                room.survey(channel.now(), channel.wall())
                room.make_room()
                if not self._is_fit:
                    self._target.check()
                    self._is_fit = True
                is_over = True
        except TargetError as error:
            self._refusals[name] = _Refusal(str(error), channel.now() + ERROR_SECONDS)
            return False
        self._refusals.pop(name, None)
        return not is_over

    def _clear(self, spiller: Spiller) -> bool:
        """Delete some of what an erased volume has there; whether nothing is left. Raises TargetError."""
        name = spiller.volume.settings.name
        if name not in self._erased and spiller.room.delete_all():
            self._erased.add(name)
            log.info("spill: what the erased volume %s had at %s is deleted", name, self._section.name)
        return name in self._erased


class SpillTier:
    """All places of an agent."""

    def __init__(
        self,
        sections: Sequence[SpillSection],
        pool_id: str,
        volumes: Sequence[PoolVolume],
        gates: Mapping[str, RecomputeGate],
        take_channels: Sequence[Callable[[], WorkerChannel]],
    ) -> None:
        """Raises ConfigError."""
        self._places: list[SpillPlace] = []
        fitting = {each.settings.name: each for each in in_sets(volumes) if can_spill(each)}
        known = {each.settings.name for each in volumes}
        named = {name for section in sections for name in section.volumes}
        for name in sorted(named):
            if name not in known:
                log.warning("spill names volume %s, which this pool does not serve", name)
            elif name not in fitting:
                raise ConfigError(
                    f"spill names {name}; a place in G4 is for key-value volumes in sets, of one copy",
                    "take that name out",
                )
        for section, take_channel in zip(sections, take_channels, strict=True):
            names = section.volumes or tuple(name for name in fitting if name not in named)
            of_place = [fitting[name] for name in names if name in fitting]
            self._places.append(SpillPlace(section, pool_id, of_place, gates, take_channel))

    def start(self) -> None:
        """Once."""
        for place in self._places:
            place.start()

    def stop(self) -> None:
        """What is in hand is stored, where the place takes it."""
        for place in self._places:
            place.stop()

    def snapshot(self) -> list[dict[str, Any]] | None:
        """By place; None where there is none."""
        return [place.snapshot() for place in self._places] or None
