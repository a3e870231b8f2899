"""Published figures against the equations; what cannot be played again says why."""

import pytest

from agent.claims.published import Published, needed_gb_s, published_figures
from agent.figures.tables import load

ROWS = published_figures(load())
JUDGED = [row for row in ROWS if row.consistent is not None]


@pytest.mark.parametrize("row", JUDGED, ids=[row.what[:30] for row in JUDGED])
def test_a_published_figure_is_consistent(row: Published) -> None:
    assert (row.consistent, row.judgement) == (True, "consistent"), row


def test_a_drive_above_its_specification_is_not_called_consistent() -> None:
    (drive,) = [row for row in ROWS if "P5336" in row.what]
    assert drive.judgement == "not judged"
    assert "6.52 and 3.07 GiB/s" in drive.here


def test_what_is_not_reproducible_gives_its_reason() -> None:
    reasons = [row.here for row in ROWS if row.here.startswith("not reproducible: ")]
    assert len(reasons) == 2
    assert any("4020" in reason for reason in reasons)
    assert any("452" in reason for reason in reasons)


def test_where_recomputing_is_faster_the_model_says_loses() -> None:
    lost = [row for row in ROWS if row.published.startswith("loses")]
    assert len(lost) == 2
    assert all(row.here.startswith("loses: ") for row in lost)


def test_the_region_of_a_wait_of_four_percent() -> None:
    """10 s of work and 0.4167 s of wait: 4 % of both."""
    assert needed_gb_s(50, 10, 0.04, 0.0) == pytest.approx(50 / (10 * 0.04 / 0.96))
    assert needed_gb_s(50, 10, 0.04, 0.9) == pytest.approx(needed_gb_s(50, 10, 0.04, 0.0) / 10)
