"""The fabric of a simulated pod: every byte that goes up comes down, and each of its options matters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from agent.errors import UserError
from agent.sim.drive_times import RatedFlash
from agent.sim.fabric import STRAIGHT, Fabric
from agent.sim.links import SharedLink
from agent.sim.pod_plan import PodPlan, changed
from agent.sim.pod_run import PodRun, RowResult
from agent.sim.virtual_time import VirtualLoop
from agent.sim.workload import Request

BLOCK_TOKENS = 512
SIZE = 64 << 20
PLAN = PodPlan(
    gpus=32, gpus_per_host=4, enclosures=8, drives=2, workers=4, g1_bytes=0, g2_bytes=0, read_deadline=5.0,
    bytes_per_token=16_384, drive_tail=0.0, drive_bytes=20_000_000_000, drive_read=1e12, drive_write=1e12,
    host_nic=10e9, enclosure_nic=10e9, fabric="ecmp", spines=4, hosts_per_leaf=4, enclosures_per_leaf=4,
)  # fmt: skip
"""Two leaves of four hosts, two of four enclosures. A link to a spine is as fast as a NIC."""


class Pod:
    """Links and drives without agents: transfers from enclosures to hosts, and when each ended."""

    def __init__(self, **changes: object) -> None:
        self.loop = VirtualLoop()
        self.plan = changed(PLAN, **changes)
        self.flash = RatedFlash(self.loop, self.plan, 35, 1)
        assert self.flash.fabric is not None
        self.fabric: Fabric = self.flash.fabric
        self.took: dict[int, float] = {}

    def read(self, enclosure: int, host: int, flow: int = 0, size: int = SIZE) -> None:
        began, number = self.loop.now, len(self.took)
        self.took[number] = 0.0

        def ended() -> None:
            self.took[number] = self.loop.now - began

        drive = self.flash.drives_of(enclosure)[0]
        self.flash.move(drive, size, self.flash.hosts[host], write=False, ended=ended, flow=flow)

    def run(self) -> list[float]:
        self.loop.run()
        assert self.fabric.balanced()
        assert all(self.took.values())
        return list(self.took.values())


def test_a_flow_keeps_its_way_and_flows_spread() -> None:
    fabric = Pod().fabric
    ways = [fabric.way_of(0, 0, flow, SIZE, write=False).links for flow in range(400)]
    assert ways[7] == fabric.way_of(0, 0, 7, SIZE, write=False).links
    shares = [sum(way[0] is link for way in ways) / 400 for link in fabric.up[2]]
    assert sum(shares) == 1.0
    assert all(share == pytest.approx(0.25, abs=0.08) for share in shares)


def test_a_leaf_keeps_its_own_to_itself() -> None:
    assert Pod().fabric.way(1, 1, SIZE, 5) is STRAIGHT


def _colliding(pod: Pod) -> int:
    """A flow of enclosure 1 that goes up by the link of flow 0 of enclosure 0."""
    first = pod.fabric.way_of(0, 0, 0, 0, write=False).links[0]
    return next(flow for flow in range(99) if pod.fabric.way_of(0, 1, flow, 0, write=False).links[0] is first)


def test_flows_that_collide_take_twice_as_long_and_sprayed_ones_do_not() -> None:
    times = {}
    for fabric in ("ecmp", "spray"):
        pod = Pod(fabric=fabric)
        flow = _colliding(Pod())
        pod.read(0, 0, 0)
        pod.read(1, 1, flow)
        times[fabric] = max(pod.run())
    assert times["spray"] == pytest.approx(SIZE / 10e9, rel=0.05)
    assert times["ecmp"] == pytest.approx(2 * SIZE / 10e9, rel=0.05)


@pytest.mark.parametrize("ecn", [False, True])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_many_enclosures_that_answer_one_host_share_its_nic(count: int, ecn: bool) -> None:
    pod = Pod(fabric="spray", ecn=ecn)
    for enclosure in range(count):
        pod.read(enclosure, 0)
    took = pod.run()
    # Control leaves some of the link unused.
    assert 0.999 * count * SIZE / 10e9 <= max(took) < count * SIZE / 10e9 * (1.3 if ecn else 1.05)
    assert pod.flash.hosts[0].nic_in.most == count


def _wait_behind(count: int, **changes: object) -> float:
    """How long a directory takes while enclosures answer its host, less what it takes alone."""
    took = []
    for busy in (0, count):
        pod = Pod(fabric="spray", **changes)
        for enclosure in range(busy):
            pod.read(enclosure, 0)
        pod.read(0, 0, size=4096)
        took.append(pod.run()[-1])
    return took[1] - took[0]


def test_ecn_keeps_queues_short() -> None:
    without, with_ecn = _wait_behind(8), _wait_behind(8, ecn=True)
    assert 0 < with_ecn < without / 3


def test_a_link_that_loses_packets_repeats_bytes_and_takes_longer() -> None:
    for fabric, least in (("ecmp", 1.05), ("spray", 1.0)):
        plain, lossy = Pod(fabric=fabric), Pod(fabric=fabric, loss=0.002)
        for pod in (plain, lossy):
            for flow in range(40):
                pod.read(flow % 4, flow % 4, flow)
            pod.run()
        assert lossy.fabric.repeated > 0
        assert lossy.fabric.counts["fabric losses"] > 0
        assert lossy.fabric.carried()[0] == plain.fabric.carried()[0] + lossy.fabric.repeated
        assert max(lossy.took.values()) > least * max(plain.took.values())


def _asked_twice(prompts: int = 20, blocks: int = 12) -> Iterator[Request]:
    for number in range(2 * prompts):
        first = number % prompts * blocks
        at = number * 0.05 + (2.0 if number >= prompts else 0.0)
        yield Request(
            number, at, blocks * BLOCK_TOKENS, 10, tuple(range(first, first + blocks)), BLOCK_TOKENS
        )


def _run(row: str = "g35", seed: int = 35, *, prompts: int = 20, **changes: object) -> RowResult:
    return PodRun(row, changed(PLAN, **changes), seed, BLOCK_TOKENS, _asked_twice(prompts)).run()


OPTIONS: tuple[dict[str, object], ...] = (
    {}, {"fabric": "spray"}, {"ecn": True}, {"loss": 0.01}, {"noise": 0.5}, {"oversubscription": 4.0},
    {"spines": 2}, {"fabric": "none"},
)  # fmt: skip


def test_the_same_seed_gives_the_same_digest_and_each_option_another() -> None:
    digests = [_run(prompts=5, **changes).digest for changes in OPTIONS]
    assert digests == [_run(prompts=5, **changes).digest for changes in OPTIONS]
    assert len(set(digests)) == len(OPTIONS)


def test_a_pod_without_a_fabric_has_no_links_of_it() -> None:
    found = _run(fabric="none")
    assert not any("fabric" in name for name in (*found.counts, *found.link_bytes))


@pytest.mark.parametrize("fabric", ["ecmp", "spray"])
@pytest.mark.parametrize("row", ["g35", "lustre-dpu"])
def test_what_crosses_leaves_is_what_nics_carried(fabric: str, row: str) -> None:
    found = _run(row, fabric=fabric, noise=0.2, loss=0.001)
    moved = found.link_bytes
    assert moved["leaves_up"] == moved["leaves_down"]
    between = moved["leaves_up"] - moved["fabric_repeated"] - moved["neighbour"]
    if row == "g35":
        assert between == moved["host_nics_in"] + moved["host_nics_out"]
    else:
        # From enclosures to servers all of it, and between servers what does not stay in a leaf.
        drives = moved["drives_read"] + moved["drives_written"]
        assert drives < between < 2 * drives


def test_a_neighbour_slows_what_shares_its_links() -> None:
    alone, beside = _run(), _run(noise=0.8)
    name = "fabric mean us of a value"
    assert beside.counts[name] > 1.2 * alone.counts[name]
    assert beside.link_bytes["neighbour"] > 0


def test_links_that_are_ten_times_slower_change_latency() -> None:
    """And ten times faster ones change it back: latency is the links' doing."""
    name = "fabric mean us of a value"
    fast, slow = _run(oversubscription=1.0), _run(oversubscription=10.0)
    assert slow.counts[name] > 2 * fast.counts[name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fabric": "ecpm"}, "did you mean ecmp"),
        ({"fabric": "none", "ecn": True}, "matters of a fabric"),
        ({"loss": 0.5}, "--loss: 0.5 is not from 0 to 0.1"),
        ({"noise": float("nan")}, "--noise: nan"),
        ({"oversubscription": 0.5}, "not from 1 to 64"),
        ({"spines": 0}, "1 to 256 spines, not 0"),
    ],
)
def test_a_fabric_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        changed(PLAN, **changes)


def test_a_link_uses_the_part_that_its_flows_have_and_says_how_long_they_wait() -> None:
    link, ends = SharedLink(100.0, parts=(1.0, 0.5), waits=(0.0, 2.0)), list[float]()
    for at, size in itertools.product((0.0,), (100, 100, 100)):
        link.begin(at, size, lambda: ends.append(0.0))
    assert link.wait() == 2.0
    # Three have what two have: half of the rate, a third of it each.
    assert link.next_end() == pytest.approx(6.0)
    link.end_due(6.0)
    assert len(ends) == 3
    assert (link.most, link.wait()) == (3, 0.0)
