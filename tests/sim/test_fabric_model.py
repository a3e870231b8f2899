"""The flow model of a congested link against the emulated NIC, packet by packet (check V13).

One to eight NICs write to one through a switch in memory, in virtual time, with real packets, marks and
notifications. The same flows go through `agent.sim.dcqcn`, and through the links of `g35 sim`. Tolerances:

    without control    every flow's time within 6 %; within 15 % where sizes and beginnings differ
    with DCQCN         the mean of the times within 10 %, each of them within 15 % in the order of their ends,
                       shares of throughput within a tenth of a fair share
    links of g35 sim   flows of equal size, without control: the last one's time within 6 %;
                       with DCQCN, what many long flows use of a link once the start is over: within 10 %
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from agent.sim.dcqcn import FluidLink, FluidSettings, steady_state
from agent.sim.links import SharedLink
from tests.support.roce.incast import SINK, Incast, paced
from tests.support.roce.switch import Switch

RATE = 1.25e9
MIB = 1 << 20


def packets(
    sizes: Sequence[int], *, ecn: bool, rate: float = RATE, begins: Sequence[float] = (), seed: int = 35
) -> list[float]:
    """How long each flow took as packets. Marks as `FluidSettings` has them."""
    switch = Switch(
        rate, round(32e-6 * rate), round(128e-6 * rate), 0.2, chance=random.Random(f"switch {seed}")
    )
    incast = Incast(sizes, switch, paced(switch) if ecn else None, begins=begins, seed=seed)
    took = incast.run()
    payload = sum(switch.carried.values())
    assert sum(sizes) <= payload < 1.05 * sum(sizes)
    return took


def fluid(
    sizes: Sequence[int], *, ecn: bool, rate: float = RATE, begins: Sequence[float] = ()
) -> list[float]:
    """How long each of the flows takes through one link of the model, ten seconds at the most."""
    link = FluidLink(FluidSettings(rate, ecn=ecn))
    flows = [link.begin(size, at) for size, at in zip(sizes, begins or [0.0] * len(sizes), strict=True)]
    link.run(10.0)
    return [(flow.end if flow.end is not None else float("inf")) - flow.begin for flow in flows]


def shares(took: Sequence[float]) -> list[float]:
    """Each flow's part of the throughput, for flows of one size."""
    rates = [1 / each for each in took]
    return [rate / sum(rates) for rate in rates]


@pytest.mark.parametrize("flows", range(1, 9))
def test_flows_without_control(flows: int) -> None:
    sizes = [2 * MIB] * flows
    found, model = packets(sizes, ecn=False), fluid(sizes, ecn=False)
    assert model == pytest.approx(found, rel=0.06)


# The numbers between are near enough to these for a change of the model to be seen here.
@pytest.mark.parametrize(
    "flows", [1, 2, 4, 8, *(pytest.param(each, marks=pytest.mark.nightly) for each in (3, 5, 6, 7))]
)
def test_flows_that_dcqcn_controls(flows: int) -> None:
    sizes = [(8 if flows < 4 else 4) * MIB] * flows
    found, model = sorted(packets(sizes, ecn=True)), sorted(fluid(sizes, ecn=True))
    assert sum(model) == pytest.approx(sum(found), rel=0.10)
    assert model == pytest.approx(found, rel=0.15)
    assert shares(model) == pytest.approx(shares(found), abs=0.1 / flows)


def test_flows_of_several_sizes_that_begin_at_several_times() -> None:
    sizes, begins = [8 * MIB, 2 * MIB, 4 * MIB, MIB], [0.0, 1e-3, 2e-3, 4e-3]
    found = packets(sizes, ecn=False, begins=begins)
    assert fluid(sizes, ecn=False, begins=begins) == pytest.approx(found, rel=0.15)


@pytest.mark.parametrize("flows", [1, 3, 8])
def test_links_of_the_pod_carry_what_packets_do(flows: int) -> None:
    link, ends, now = SharedLink(RATE), list[float](), 0.0
    for _ in range(flows):
        link.begin(0.0, 2 * MIB, lambda: ends.append(now))
    while len(link):
        now = link.next_end()
        link.end_due(now)
    assert max(ends) == pytest.approx(max(packets([2 * MIB] * flows, ecn=False)), rel=0.06)


@pytest.mark.parametrize("flows", [2, 4, 8])
def test_links_of_the_pod_are_used_as_packets_use_them(flows: int) -> None:
    switch = Switch(RATE, round(32e-6 * RATE), round(128e-6 * RATE), 0.2)
    incast = Incast([64 * MIB] * flows, switch, paced(switch))
    incast.start()
    carried = []
    for seconds in (0.02, 0.02):
        incast.network.run(most_seconds=seconds)
        carried.append(switch.carried[SINK])
    used = (carried[1] - carried[0]) / (0.02 * RATE)
    parts, _ = steady_state(FluidSettings(RATE))
    assert parts[flows - 1] == pytest.approx(used, rel=0.10)


@pytest.mark.parametrize("ecn", [False, True])
def test_a_link_of_ten_times_the_rate_takes_a_tenth_of_the_time(ecn: bool) -> None:
    """Were latency not the link's doing, in the packets or in the model, this would fail."""
    sizes = [2 * MIB] * 3
    for times in (packets, fluid):
        slow, fast = (sum(times(sizes, ecn=ecn, rate=rate)) for rate in (RATE, 10 * RATE))
        assert slow > 5 * fast
