"""How many workers an agent takes, by what the enclosures grant it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agent.errors import G35Error
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from agent.service.queue_plan import EXTRA_QUEUES, granted_workers, spare_queues


def granting(queues: int) -> Any:
    return SimpleNamespace(facts=SimpleNamespace(io_queues=queues))


def fabric(**granted: int | None) -> Fabric:
    """Enclosures by name, and the I/O queues that each grants; None: not connected."""
    return Fabric(
        [
            Enclosure(
                name,
                session=None if queues is None else granting(queues),
            )
            for name, queues in granted.items()
        ]
    )


def test_as_many_as_are_wanted_where_everybody_grants_them() -> None:
    assert granted_workers(fabric(rich=64, enough=4 + EXTRA_QUEUES, away=None), 4) == 4
    assert granted_workers(fabric(away=None), 4) == 4


@pytest.mark.expects_log("enclosure poor grants 6 I/O queues", "enclosure poorest grants 5 I/O queues")
def test_the_poorest_enclosure_decides(caplog: pytest.LogCaptureFixture) -> None:
    assert granted_workers(fabric(rich=64, poor=6, poorest=5), 4) == 1
    assert len(caplog.messages) == 2, "one line for each that grants too few"


def test_too_few_for_one_worker_is_refused() -> None:
    with pytest.raises(G35Error, match=r"enclosure mean grants 4 I/O queues .* needs 5"):
        granted_workers(fabric(rich=64, mean=EXTRA_QUEUES), 4)


@pytest.mark.expects_log("enclosures grant 2 of 6 I/O queues for puts", "enclosures grant 0 of 6")
def test_what_is_left_is_for_slots_that_are_lent() -> None:
    assert spare_queues(fabric(rich=64, away=None), 10, 6) == 6
    assert spare_queues(fabric(rich=64, poor=12), 10, 6) == 2
    assert spare_queues(fabric(poorest=9), 10, 6) == 0
    assert spare_queues(fabric(poorest=9), 10, 0) == 0
