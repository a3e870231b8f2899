"""A whole pod in virtual time, many seeds: see agent/sim/pod_simulation.py for what must hold.

G35_SEED moves the seeds, G35_SEEDS says how many. A failure prints the seed; running it alone:
    .venv/bin/python -m agent.sim.pod_report --seed 35 --only NUMBER
A seed that found a fault of ours stays in REGRESSIONS for ever.
"""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, modes

from agent.inline import cipher_suites
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.read.get import SlotReader
from agent.remote.outlier_detection import Verdict
from agent.sim.pod_flash import Flash, Wrong
from agent.sim.pod_shapes import FAULTS, calm_shape, full_shape
from agent.sim.pod_simulation import PodSimulation
from agent.sim.seeded_scheduler import Task
from tests.support.sim.seed_counts import seed_count

SEEDS = seed_count(whole=1000, part=100)
GROUP_SEEDS = 100
GROUPS = max(1, SEEDS // GROUP_SEEDS)
REGRESSIONS: tuple[tuple[int, int], ...] = ()


def played(seed: tuple[int, int], **shape: Any) -> PodSimulation:
    simulation = PodSimulation(seed, **shape)
    try:
        simulation.run()
    except Exception as error:
        raise AssertionError(f"pod {seed}: {error!r}, {dict(simulation.counts)}") from error
    return simulation


@pytest.mark.parametrize("group", range(GROUPS))
def test_many_small_pods(group: int, seed: int) -> None:
    counts: Counter[str] = Counter()
    lost = 0
    for number in range(group, SEEDS, GROUPS):
        simulation = played((seed, number))
        counts.update(simulation.counts)
        lost += simulation.lost_between_agents
    print(dict(counts), f"lost between agents {lost}")
    if SEEDS >= GROUP_SEEDS:
        # A run in which nothing went wrong, or nothing was checked, proves nothing.
        for what in [f"fault {name}" for name in FAULTS if name != "agent"] + ["agents killed"]:
            assert counts[what] > 5, what
        for cause in ("late", "enclosure_down", "never_stored"):
            assert counts[f"miss {cause}"] > 0, cause
        assert counts["hits"] > 1000
        assert counts["checked at the end"] > 500
        assert counts["stray reads"] > 5


@pytest.mark.parametrize(
    ("number", "seconds"),
    [(0, 2.0), *(pytest.param(each, 4.0, marks=pytest.mark.nightly) for each in (0, 1))],
)
def test_the_pod_at_full_size(number: int, seconds: float, seed: int) -> None:
    pod = PodSimulation((seed, number), full_shape(seconds))
    pod.scheduler.call_at(pod.scheduler.now + seconds - 0.8, lambda: pod.change_map("join", pod.rng))
    pod.run()
    print(*pod.report(), sep="\n")
    assert pod.counts["stored"] > 1000
    assert pod.counts["checked at the end"] > 100
    joined = [each for each in pod.moved if each.change == "join"]
    assert joined
    # One enclosure of 36; of the few values of the first second a share says nothing.
    assert all(each.bytes_moved < 0.1 * each.bytes_stored for each in joined if each.bytes_stored > 1e6)


def test_the_same_seed_is_the_same_run(seed: int) -> None:
    for number in range(6):
        runs = {PodSimulation((seed, number)).run() for _ in range(2)}
        assert len(runs) == 1, f"pod {seed} {number} differs from itself"
    assert PodSimulation((seed, 0)).run() != PodSimulation((seed, 1)).run()


def test_seeds_that_found_something_once() -> None:
    # One test for all: an empty parameter list would be a skip that names nothing missing here.
    for seed in REGRESSIONS:
        played(seed)


# -- gray failure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["stop", "slow"])
def test_a_sick_enclosure_is_noticed_avoided_and_taken_back(fault: str, seed: int) -> None:
    """Every agent suspects both of its drives and nothing else; what is stored then is checked by the pod."""
    pod = PodSimulation((seed, 1), calm_shape(seconds=11.0))
    began = pod.scheduler.now + 1.0
    pod.scheduler.call_at(began, lambda: pod.hurt(fault, 2, began + 2.0))
    pod.run()
    seconds = [each.seconds for each in pod.noticed]
    print(f"{fault}: noticed after {[f'{each:.2f}' for each in seconds]} s")
    assert {each.agent for each in pod.noticed} == {0, 1}
    assert suspects_of(pod) == {(agent, member) for agent in (0, 1) for member in (4, 5)}
    assert max(seconds) < 2.0
    back = [at for at, _, _, verdict in pod.verdicts if verdict is Verdict.PROBATION]
    assert len(back) == 4
    assert min(back) > began + 2.0
    assert not pod.tally().evictions


def test_an_enclosure_that_errs_one_time_in_a_hundred_is_noticed(seed: int) -> None:
    """That takes a few hundred answers of it, and a while to be forgiven."""
    pod = PodSimulation((seed, 1), calm_shape(enclosures=3, seconds=7.0, rate=500.0))
    began = pod.scheduler.now + 0.5
    pod.scheduler.call_at(began, lambda: pod.hurt("err", 2, began + 7.0))
    pod.run()
    print(f"err: noticed after {[f'{each.seconds:.2f}' for each in pod.noticed]} s")
    assert pod.noticed
    assert suspects_of(pod) <= {(agent, member) for agent in (0, 1) for member in (4, 5)}


def suspects_of(pod: PodSimulation) -> set[tuple[int, int]]:
    """Which agent suspected which drive."""
    return {(agent, member) for _, agent, member, verdict in pod.verdicts if verdict is Verdict.SUSPECT}


def test_a_sick_drive_casts_no_suspicion_on_its_enclosure(seed: int) -> None:
    pod = PodSimulation((seed, 2), calm_shape(drives_each=4, seconds=3.0, rate=400.0))
    began = pod.scheduler.now + 0.5
    pod.scheduler.call_at(began, pod.flash.drives[5].hang)
    pod.scheduler.call_at(began + 2.0, lambda: pod.flash.drives[5].wake(pod.scheduler))
    pod.run()
    assert {member for _, member in suspects_of(pod)} == {5}


# -- joining and leaving --------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["join", "leave"])
def test_what_a_change_of_the_map_moves(change: str, seed: int) -> None:
    """About the share of the drives that came or went. Rather less where drives join a pool with much room:
    of two sets that are alike the better-ranked is taken, and one that joins displaces the other."""
    moved = []
    for number in range(3):
        shape = calm_shape(drives_each=4, seconds=1.6)._replace(faults=("join", "leave"), whole=True)
        pod = PodSimulation((seed, number), shape)
        pod.scheduler.call_at(pod.scheduler.now + 1.2, lambda pod=pod: pod.change_map(change, pod.rng))  # type: ignore[misc]
        pod.run()
        moved += pod.moved
    assert len(moved) == 3
    share = sum(each.bytes_moved for each in moved) / sum(each.bytes_stored for each in moved)
    expected = median(each.share_of_drives for each in moved)
    print(f"{change}: {share:.1%} of the bytes moved, {expected:.1%} of the drives")
    assert 0.3 * expected < share < 1.4 * expected


def test_what_belongs_to_drives_that_joined_moves_there_and_is_served_all_the_time(seed: int) -> None:
    """An enclosure joins a pool that is well; after a while nothing is at an earlier place any more."""
    shape = calm_shape(drives_each=2, seconds=4.0, rate=60.0)._replace(
        faults=("join",), whole=True, moves=True, joins_at=1.0, writers=1, keys=300
    )
    pod = PodSimulation((seed, "moves"), shape)
    pod.run()
    [joined] = pod.moved
    assert pod.counts["settled"] == 1  # which the mover does when it finds nothing
    assert pod.map.settled == 0
    assert 0 < joined.bytes_moved <= pod.counts["bytes moved"]
    assert not pod.tally().evictions
    # What is missed was never stored, or deleted, or deleted while it was read.
    assert {name for name in pod.counts if name.startswith("miss ")} <= {"miss never_stored", "miss evicted"}


# -- running full --------------------------------------------------------------------------------------


def test_nothing_is_evicted_before_a_volume_is_nine_tenths_full(seed: int) -> None:
    """Two agents fill two volumes that share all drives, each volume with room of its own."""
    shape = calm_shape(seconds=6.0, rate=400.0)._replace(sets=(1, 1), keys=1600)
    pod = PodSimulation((seed, 4), shape)
    check, slots = pod.scheduler.after_step, SLOTS_PER_SET * len(pod.map.members)
    full: dict[str, float] = {}

    def watch(task: Task) -> None:
        assert check is not None
        check(task)
        for volume in range(2):
            name = f"v{volume}"
            if name in full or not any(tallies[name].evictions for tallies in pod.tallies if name in tallies):
                continue
            settings = pod.map.settings(volume)
            full[name] = (
                sum(pod.flash.taken(each.namespace, each.offset) for each in settings.extents) / slots
            )

    pod.scheduler.after_step = watch
    pod.run()
    print(f"first evictions at {full}")
    assert set(full) == {"v0", "v1"}
    assert min(full.values()) > 0.9


# -- the oracle itself ----------------------------------------------------------------------------------


def test_the_oracle_sees_that_a_slow_enclosure_loses_something(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(flash: Flash, enclosure: int, until: float, times: float) -> None:
        for drive in flash.drives_of(enclosure):
            drive.blocks.clear()

    monkeypatch.setattr(Flash, "slow", forget)
    assert found_wrong(seed, "was acknowledged", "slow")


def test_the_oracle_sees_a_read_that_takes_its_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SlotReader.read

    def patient(reading: SlotReader, channel: Any, offset: int, into: Any, deadline: float) -> Any:
        return original(reading, channel, offset, into, deadline + 0.1)

    monkeypatch.setattr(SlotReader, "read", patient)
    assert found_wrong(seed, "a read took", "stop")


def test_the_oracle_sees_a_new_value_on_a_suspect(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's choice is made blind; the oracle's is not."""
    from agent.pool.write.put import SlotWriter

    original = SlotWriter._reserve

    def blind(writing: SlotWriter, channel: Any, sets: Any, **how: Any) -> None:
        trusted = [health.trusted for health in channel._health]
        for health in channel._health:
            health.trusted = True
        try:
            original(writing, channel, sets, **how)
        finally:
            for health, before in zip(channel._health, trusted, strict=True):
                health.trusted = before

    monkeypatch.setattr(SlotWriter, "_reserve", blind)
    pod = PodSimulation((seed, 1), calm_shape(enclosures=3, seconds=6.0))
    until = pod.scheduler.now + 6.0
    pod.scheduler.call_at(pod.scheduler.now + 0.5, lambda: pod.flash.slow(2, until, 10.0))
    with pytest.raises(Wrong, match="which is a suspect"):
        pod.run()


@pytest.mark.interpreted
def test_the_oracle_sees_a_read_that_is_not_proven(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drives bring other bytes without an error. With the proofs of units off, a get serves them."""

    shape = calm_shape(3, 2, 1.0, 150.0)._replace(strays=0.05)
    assert PodSimulation((seed, 0), shape).run()

    def unproven(
        slot: Any, number: int, sealed_and_room: memoryview, into: memoryview, bound: bytes, proof: bytes
    ) -> bool:
        nonce = slot._nonce_prefix + number.to_bytes(4, "little")
        decryptor = Cipher(slot._in_parts(), modes.GCM(nonce)).decryptor()
        decryptor.update_into(sealed_and_room[: len(into)], into)
        return True

    monkeypatch.setattr(cipher_suites._GcmSlot, "open_unit", unproven)
    monkeypatch.setattr(cipher_suites._GcmSlot, "open_with_room", unproven)
    for number in range(8):
        try:
            PodSimulation((seed, number), shape).run()
        except Wrong as error:
            if "that nobody stored" in str(error):
                return
    raise AssertionError("no other byte was seen in 8 pods")


def found_wrong(seed: int, what: str, fault: str) -> bool:
    """Whether one of ten pods ends with what the oracle says."""
    shape = calm_shape(3, 2, 1.0, 150.0)._replace(writers=1, fault_every=0.2, faults=(fault,))
    for number in range(10):
        try:
            PodSimulation((seed, number), shape).run()
        except Wrong as wrong:
            if what in str(wrong):
                return True
    return False
