"""`make test` runs every folder of tests, and each in one stream."""

from __future__ import annotations

from tests.support.rungs.all_rungs import CALM, LAB, TESTS, after_the_lab, beside_the_lab


def test_every_test_file_is_in_one_stream() -> None:
    streams = [*LAB, *beside_the_lab(), *after_the_lab()]
    for file in TESTS.rglob("test_*.py"):
        place = file.relative_to(TESTS).as_posix()
        assert sum(place.startswith(f"{folder}/") for folder in streams) == 1, place


def test_what_shares_the_machine_is_there() -> None:
    assert all((TESTS / "system" / name).is_dir() for name in CALM)
