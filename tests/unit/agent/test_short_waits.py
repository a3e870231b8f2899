"""What a call for slots waits for an enclosure, where half of a reader's workers have such calls already."""

from __future__ import annotations

from agent.host_os.workers_on_duty import Roster, WorkerOnDuty
from agent.remote.long_waits import PATIENCE_LEAST, LongWaits
from agent.service.worker_channels import SHORT_WAIT_SECONDS, with_short_waits, with_waits


class Channel:
    duty: WorkerOnDuty | None = None

    def share_waits(self, of_door: LongWaits, *, may_park: bool) -> None:
        self.waits, self.may_park = of_door, may_park


def test_a_lender_waits_longer_than_a_busy_machine_lets_an_enclosure_say_nothing() -> None:
    taken = with_short_waits(lambda number: Channel(), 0.05)(1)  # type: ignore[arg-type, return-value]
    waits = taken.waits  # type: ignore[attr-defined]
    assert waits.patience == SHORT_WAIT_SECONDS > 2 * PATIENCE_LEAST
    assert not waits.most_of_one
    longer = with_short_waits(lambda number: Channel(), 10.0)(1)  # type: ignore[arg-type, return-value]
    assert longer.waits.patience == 10.0  # type: ignore[attr-defined]


def test_a_worker_of_a_door_is_on_duty_by_its_number() -> None:
    waits, roster = LongWaits(2, 0.05), Roster(2)
    take = with_waits(lambda number: Channel(), waits, roster, may_park=True)  # type: ignore[arg-type, return-value]
    channels = [take(number) for number in range(2)]
    assert [each.duty for each in channels] == roster.workers
    assert all(each.waits is waits and each.may_park for each in channels)  # type: ignore[attr-defined]
    assert with_waits(lambda number: Channel(), waits)(0).duty is None  # type: ignore[arg-type, return-value]
