"""`make test` runs every folder of tests, and each in one job."""

from __future__ import annotations

from nvmeof.compiled import SWITCH
from tests.support.rungs.all_rungs import (
    ALONE,
    COMPILED,
    COMPUTE,
    LAB,
    NO_TESTS,
    TESTS,
    compiled_job,
    first_failure,
    interpreted_jobs,
    shared_jobs,
)


def test_every_test_file_is_in_one_job() -> None:
    jobs = [[*LAB], [*COMPUTE], [*ALONE], *shared_jobs()]
    for file in TESTS.rglob("test_*.py"):
        place = file.relative_to(TESTS).as_posix()
        of_it = [each for job in jobs for each in job if place == each or place.startswith(f"{each}/")]
        assert len(of_it) == 1, place


def test_what_has_the_machine_to_itself_is_there() -> None:
    assert all((TESTS / place).exists() for place in ALONE)


def test_what_is_left_out_for_the_compiled_job_runs_there_or_is_marked() -> None:
    most, marked = interpreted_jobs(["-x"])
    job = compiled_job(["-x"])
    assert job.environment == {SWITCH: ""}
    for place in COMPILED:
        assert (TESTS / place).is_dir()
        assert f"--ignore={TESTS / place}" in most.words
        assert str(TESTS / place) in marked.words
        assert str(TESTS / place) in job.words
    assert [list(each.words)[-3:] for each in (marked, job)] == [
        ["-m", "interpreted and not nightly", "-x"],
        ["-m", "not interpreted and not nightly", "-x"],
    ]
    assert not {word for word in most.words if word.startswith("--ignore")} - {
        f"--ignore={TESTS / place}" for place in COMPILED
    }


def test_no_job_is_empty() -> None:
    assert all(shared_jobs())


def test_a_failed_part_is_the_exit_code_and_one_without_tests_is_none() -> None:
    assert first_failure([0, NO_TESTS, 0]) == 0
    assert first_failure([0, NO_TESTS, 2, 1]) == 2
    assert first_failure([NO_TESTS, NO_TESTS]) == NO_TESTS
