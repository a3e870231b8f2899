"""Which I/O queue ids the threads of an agent have."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.service.queue_plan import EXTRA_QUEUES, QueuePlan
from agent.service.slot_lender import links_of
from agent.service.why_alone import why_alone
from tests.unit.agent.test_volume_policies import configuration


@given(
    granted=st.integers(1, 8),
    guests=st.integers(0, 3),
    back=st.booleans(),
    auto=st.booleans(),
)
def test_every_thread_has_an_id_of_its_own_also_where_few_workers_are_granted(
    granted: int, guests: int, back: bool, auto: bool
) -> None:
    found = configuration(
        virtiofs=[{"socket": f"/run/guest-{number}.sock"} for number in range(guests)],
        policies=[{"volume": "v", "write": "back"}] if back else [],
        pool={"membership": "auto" if auto else "manual"},
    )
    found = found.model_copy(update={"agent": found.agent.model_copy(update={"workers": 8})})
    plan = QueuePlan.of(found, granted)
    assert list(plan.workers) == list(range(1, granted + 1))
    assert [len(each) for each in plan.guests] == [8] * guests, "a guest was told how many queues it has"
    assert plan.total == granted + plan.extra
    assert plan.extra == QueuePlan.of(found).extra == EXTRA_QUEUES + 8 * guests + back + auto
    assert (plan.write_back is None, plan.members is None) == (not back, not auto)


def test_an_id_that_is_there_twice_is_refused() -> None:
    none = range(7, 7)
    with pytest.raises(AssertionError, match="not each there once"):
        QueuePlan(range(1, 3), range(3, 5), 5, 6, None, None, 6, (), none, none, none, none)


def test_each_reader_has_threads_that_lend_it_slots() -> None:
    found = configuration()
    found = found.model_copy(
        update={"agent": found.agent.model_copy(update={"processes": 3, "mount": Path("/mnt/g35")})}
    )
    plan = QueuePlan.of(found)
    assert len(plan.slots) == (0 if why_alone(found) else 2 * links_of(found))
    assert plan.total == plan.extra + len(plan.workers) + len(plan.slots)
    assert len(QueuePlan.of(found, slots=1).slots) == 1
    assert not QueuePlan.of(configuration()).slots


@pytest.mark.parametrize(("workers", "links"), [(1, 1), (2, 2), (3, 3), (4, 4), (8, 4), (64, 4)])
def test_each_worker_of_a_reader_has_a_link_up_to_four(workers: int, links: int) -> None:
    found = configuration()
    found = found.model_copy(
        update={
            "agent": found.agent.model_copy(
                update={"processes": 2, "workers": workers, "mount": Path("/mnt/g35")}
            )
        }
    )
    assert links_of(found) == links
    without = found.model_copy(update={"agent": found.agent.model_copy(update={"mount": None})})
    assert links_of(without) == 0, "nobody puts by it"
