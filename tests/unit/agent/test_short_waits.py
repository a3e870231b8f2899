"""What a call for slots waits for an enclosure, where half of a reader's workers have such calls already."""

from __future__ import annotations

from agent.remote.long_waits import PATIENCE_LEAST, LongWaits
from agent.service.slot_links import SHORT_WAIT_SECONDS, with_short_waits


class Channel:
    def share_waits(self, of_door: LongWaits) -> None:
        self.waits = of_door


def test_a_lender_waits_longer_than_a_busy_machine_lets_an_enclosure_say_nothing() -> None:
    taken = with_short_waits(lambda number: Channel(), 0.05)(1)  # type: ignore[arg-type, return-value]
    waits = taken.waits  # type: ignore[attr-defined]
    assert waits.patience == SHORT_WAIT_SECONDS > 2 * PATIENCE_LEAST
    assert not waits.most_of_one
    longer = with_short_waits(lambda number: Channel(), 10.0)(1)  # type: ignore[arg-type, return-value]
    assert longer.waits.patience == 10.0  # type: ignore[attr-defined]
