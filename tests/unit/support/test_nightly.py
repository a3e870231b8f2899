"""What `make test` leaves out is run by `make nightly`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.rungs.all_rungs import TESTS
from tests.support.rungs.nightly import ALL, LONG, PARTS
from tests.support.sim.seed_counts import seed_count


def test_every_test_that_is_marked_nightly_is_in_a_part() -> None:
    folders = [folder for part in PARTS if part.marks in (ALL, "nightly") for folder in part.folders]
    marked = [
        file.relative_to(TESTS).as_posix()
        for file in TESTS.rglob("*.py")
        if re.search(r"\bmark\.nightly\b", file.read_text()) and file != Path(__file__)
    ]
    assert marked
    assert [place for place in marked if not any(place.startswith(f"{folder}/") for folder in folders)] == []


def test_engines_that_ci_has_no_minute_for_are_imported() -> None:
    (part,) = [each for each in PARTS if "system/engines" in each.folders]
    assert part.environment == {"G35_ENGINES": "1"}
    assert "system" in [folder for each in PARTS if each.marks == "nightly" for folder in each.folders]
    assert part.marks == "not nightly", "those that are marked are in the other part"


def test_a_part_of_the_seeds_is_played_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("G35_SEEDS", raising=False)
    assert seed_count(whole=1000, part=200) == 200
    assert seed_count(whole=40) == 40
    monkeypatch.setenv("G35_SEEDS", LONG["G35_SEEDS"])
    assert seed_count(whole=1000, part=200) == 1000
    monkeypatch.setenv("G35_SEEDS", "7")
    assert seed_count(whole=1000, part=200) == seed_count(whole=40) == 7


def test_only_seed_counts_reads_how_many_seeds_are_played() -> None:
    readers = [
        file.relative_to(TESTS).as_posix()
        for file in TESTS.rglob("*.py")
        if re.search(r"(environ|getenv)\b.*_SEEDS\b", file.read_text()) and file != Path(__file__)
    ]
    assert readers == ["support/sim/seed_counts.py"]
