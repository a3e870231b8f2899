"""`make test` runs every folder of tests, and each in one job."""

from __future__ import annotations

from tests.support.rungs.all_rungs import ALONE, COMPUTE, LAB, NO_TESTS, TESTS, first_failure, shared_jobs


def test_every_test_file_is_in_one_job() -> None:
    jobs = [[*LAB], [*COMPUTE], [*ALONE], *shared_jobs()]
    for file in TESTS.rglob("test_*.py"):
        place = file.relative_to(TESTS).as_posix()
        of_it = [each for job in jobs for each in job if place == each or place.startswith(f"{each}/")]
        assert len(of_it) == 1, place


def test_what_has_the_machine_to_itself_is_there() -> None:
    assert all((TESTS / place).exists() for place in ALONE)


def test_no_job_is_empty() -> None:
    assert all(shared_jobs())


def test_a_failed_part_is_the_exit_code_and_one_without_tests_is_none() -> None:
    assert first_failure([0, NO_TESTS, 0]) == 0
    assert first_failure([0, NO_TESTS, 2, 1]) == 2
    assert first_failure([NO_TESTS, NO_TESTS]) == NO_TESTS
