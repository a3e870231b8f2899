"""A place that is missing, hangs or refuses keeps nobody waiting, and says so."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from agent.config.spill_section import SpillSection
from agent.pool.read.get import SlotReader
from agent.spill.copy_down import Spiller
from agent.spill.folder import FolderTarget
from agent.spill.names import bundle_name
from agent.spill.room import Room
from agent.spill.target import Taken, TargetError
from agent.spill.tier import (
    ERROR_SECONDS,
    IDLE_MOST_SECONDS,
    IDLE_SECONDS,
    LOG_SECONDS,
    SpillPlace,
    SpillTier,
)
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of
from tests.support.pool.spill_pool import POOL_ID, MemoryTarget, SpillingAgent

VOLUME = bytes(range(16))


def section_of(folder: Path, **settings: Any) -> SpillSection:
    return SpillSection.model_validate({"folder": str(folder), "max_bytes": "1G"} | settings)


def tier_of(section: SpillSection) -> tuple[SpillTier, SpillPlace, PoolAgent]:
    agent = MemoryPool((1,)).agent()
    tier = SpillTier([section], POOL_ID, [agent.volume], {}, [lambda: agent.channel])  # type: ignore[list-item, return-value]
    return tier, tier._places[0], agent


def full(target: MemoryTarget) -> SpillingAgent:
    """One set, full; the first eight values were read once."""
    spilling = SpillingAgent(MemoryPool((1,)).agent(), target)
    for number in range(64):
        spilling.put(key_of(number), bytes(10_000))
    for number in range(8):
        assert spilling.agent.get(key_of(number)) == bytes(10_000)
    return spilling


def shown(place: SpillPlace) -> str:
    return str(place.snapshot()["error"])


@pytest.mark.expects_log("cannot be used")
def test_an_agent_is_made_without_its_place_and_finds_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, waited = tmp_path / "folder", 0.0
    tier, place, agent = tier_of(section_of(folder))

    def wait(seconds: float) -> bool:
        nonlocal waited
        agent.channel.clock += seconds
        waited += seconds
        if waited > 5.0:
            folder.mkdir(exist_ok=True)
        else:
            assert "cannot be used" in shown(place)
        if not shown(place) or waited > 5.0 + 3 * ERROR_SECONDS:
            place.stopping.set()
        return False

    monkeypatch.setattr(place.stopping, "wait", wait)
    with caplog.at_level(logging.WARNING):
        place._work()
    assert not shown(place)
    (line,) = caplog.messages
    assert "cannot be used" in line
    tier.stop()


def test_a_thread_that_finds_nothing_to_do_sleeps_longer_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, place, _ = tier_of(section_of(tmp_path))
    waited: list[float] = []
    works = iter([None, None, None, None, None, None, 0, None, None])
    """What each turn moved; None: there was nothing to do."""

    def turn(self: Spiller, channel: object) -> Any:
        yield from ()
        return next(works)

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        if len(waited) == 9:
            place.stopping.set()
        return False

    monkeypatch.setattr(Spiller, "turn", turn)
    monkeypatch.setattr(place.stopping, "wait", wait)
    place._work()
    doubled = [IDLE_SECONDS, 2 * IDLE_SECONDS, 4 * IDLE_SECONDS, 8 * IDLE_SECONDS]
    assert waited == [*doubled, IDLE_MOST_SECONDS, IDLE_MOST_SECONDS, 0.0, *doubled[:2]]
    tier.stop()


@pytest.mark.expects_log("error [0-9]+")
def test_errors_that_change_are_logged_once_in_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier, place, _ = tier_of(section_of(tmp_path))
    with caplog.at_level(logging.WARNING):
        for second in range(60):
            place._error = f"error {second}"
            place._tell(1000.0 + second)
    assert len(caplog.messages) == 60 / LOG_SECONDS
    tier.stop()


@pytest.mark.expects_log("it hung")
def test_a_place_that_hangs_holds_its_own_thread_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, over = threading.Event(), threading.Event()

    def root(self: FolderTarget) -> Any:
        hangs.set()
        over.wait(60)
        raise TargetError("it hung")

    monkeypatch.setattr(FolderTarget, "_root", root)
    tier, place, _ = tier_of(section_of(tmp_path))
    assert not hangs.is_set()
    tier.start()
    assert hangs.wait(60)
    began = place._began
    assert began is not None
    assert not place._silence(began + 1.0)
    assert "has not answered for 30 s" in place._silence(began + 30.0)
    place.stopping.set()
    over.set()
    tier.stop()


@pytest.mark.parametrize("kind", ["missing", "a file", "without room"])
def test_a_folder_that_cannot_be_used_says_why(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "folder"
    if kind == "a file":
        folder.write_text("")
    elif kind == "without room":
        folder.mkdir()
    target = FolderTarget(folder, 1 << 60)
    with pytest.raises(TargetError, match="give it room" if kind == "without room" else "cannot be used"):
        target.check()
    target.close()


class TakenTarget(MemoryTarget):
    """As many names are taken as `taken` says."""

    taken = 0

    def put(self, name: str, data: memoryview) -> None:
        if self.taken:
            self.taken -= 1
            raise Taken(name)
        super().put(name, data)


@pytest.mark.parametrize("taken", [0, 3, 8])
@pytest.mark.parametrize("is_refused", [False, True])
def test_room_for_what_was_not_stored_is_given_back(taken: int, is_refused: bool) -> None:
    target, agent = TakenTarget(), MemoryPool((1,)).agent()
    room = Room(target, POOL_ID, agent.volume.settings.volume_id, 1 << 30)
    spilling = SpillingAgent(agent, target, all_values=True, room=room)
    for number in range(64):
        agent.put(key_of(number), bytes(10_000))
    agent.put(key_of(1000), bytes(10_000))
    spilling.spill(store=False)
    target.taken = taken
    target.refusal = TargetError("503") if is_refused else None
    spilling.spiller.store(agent.channel.wall())
    assert spilling.spiller.counts.bundles == (taken < 8 and not is_refused)
    assert room.used == sum(map(len, target.objects.values()))
    assert bool(room.used) == (taken < 8 and not is_refused)


def test_room_is_never_less_than_nothing() -> None:
    target = MemoryTarget()
    room = Room(target, POOL_ID, VOLUME, 1000)
    assert room.take(600)
    target.objects[bundle_name(POOL_ID, VOLUME, 1)] = bytes(10)
    room.survey(1.0, 1.8e9)
    room.give_back(600)
    assert room.used == 0


def test_what_is_served_while_its_volume_is_erased_holds_no_memory() -> None:
    spilling = full(MemoryTarget())
    for number in range(1000, 1000 + 4 * 64):
        spilling.put(key_of(number), bytes(10_000))
    key, before = key_of(1), spilling.health._memory
    reading, late = SlotReader(spilling.agent.volume, key), SlotReader(spilling.agent.volume, key)
    assert isinstance(spilling.agent.read(reading), bytes)
    reading.close()
    spilling.below.forget()
    for _ in range(3):
        assert isinstance(spilling.agent.read(late), bytes)
        late.close()
        late = SlotReader(spilling.agent.volume, key)
    assert len(spilling.below) == 0
    assert spilling.health._memory == before
