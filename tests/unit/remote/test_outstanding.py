"""What the answer to one request says of its namespace, and how long it is waited for."""

from __future__ import annotations

from agent.remote.circuit_breaker import (
    LATE_BEFORE_PAUSE,
    PATIENT_LATE_BEFORE_PAUSE,
    PAUSE_MAX,
    Health,
    Outstanding,
)


def test_a_suspect_is_read_with_less_patience_and_written_with_as_much_as_ever() -> None:
    health = Health()
    health.patience = 0.003
    assert Outstanding(health, 10.0, is_read=True).wait_until(10.05) == 10.003
    assert Outstanding(health, 10.0, is_read=True).wait_until(10.001) == 10.001
    assert Outstanding(health, 10.0, is_read=False).wait_until(10.05) == 10.05


def test_the_reader_of_a_file_waits_for_a_suspect_and_for_one_that_is_late_for_gets() -> None:
    health = Health()
    health.patience = 0.003
    assert Outstanding(health, 10.0, is_read=True, is_patient=True).wait_until(15.0) == 15.0
    for _ in range(LATE_BEFORE_PAUSE):
        asked = Outstanding(health, 10.0, is_read=True)
        asked.given_up(asked.wait_until(10.05))
    assert not health.may_ask(10.05)
    assert health.may_ask(10.05, patient=True)


def test_readers_of_files_leave_a_namespace_alone_that_keeps_them_waiting_to_the_end() -> None:
    health, now = Health(), 10.0
    for _ in range(PATIENT_LATE_BEFORE_PAUSE):
        assert health.may_ask(now, patient=True)
        asked = Outstanding(health, now, is_read=True, is_patient=True)
        now = asked.wait_until(now + 5.0)
        asked.given_up(now)
    assert not health.may_ask(now, patient=True)
    assert health.may_ask(now + PAUSE_MAX, patient=True), "the probe"
    assert not health.may_ask(now + PAUSE_MAX, patient=True), "others wait for what it brings"
    Outstanding(health, now, is_read=True).answered(now + PAUSE_MAX, failed=False)
    assert health.may_ask(now + PAUSE_MAX, patient=True)


def no_answer(health: Health, now: float) -> float:
    """Patient readers find no answer, until they are refused; when that is."""
    while health.may_ask(now, patient=True):
        asked = Outstanding(health, now, is_read=True, is_patient=True)
        now = asked.wait_until(now + 5.0)
        asked.given_up(now)
    return now


def test_readers_of_files_wait_for_a_drive_that_hangs_one_at_a_time() -> None:
    health = Health()
    now = no_answer(health, 10.0) + PAUSE_MAX
    waiting = [moment for moment in range(49) if health.may_ask(now + moment / 10, patient=True)]
    assert waiting == [0], "each keeps a worker from serving gets for as long as a write may take"


def test_the_rest_of_a_read_that_was_late_shortens_no_pause() -> None:
    """What a read had asked for beside what it waited for is given up with it."""
    health = Health()
    now = no_answer(health, 10.0) + PAUSE_MAX
    assert health.may_ask(now, patient=True)
    Outstanding(health, now, is_read=True, is_patient=True).given_up(now + 0.5)
    assert not health.may_ask(now + 1.0, patient=True)


def test_a_probe_whose_connection_was_lost_is_made_again() -> None:
    health = Health()
    now = no_answer(health, 10.0) + PAUSE_MAX
    assert health.may_ask(now, patient=True)
    asked = Outstanding(health, now, is_read=True, is_patient=True)
    asked.wait_until(now + 5.0)
    asked.answered(now + 0.5, failed=True, lost=True)
    assert health.may_ask(now + 1.0, patient=True)


def test_an_answer_counts_once() -> None:
    health = Health()
    asked = Outstanding(health, 10.0, is_read=True)
    asked.wait_until(10.05)
    asked.answered(10.001, failed=False)
    asked.answered(10.004, failed=True)
    assert (health.answers, health.errors, sum(health.reads_took)) == (1, 0, 1)


def test_a_lost_way_says_nothing_of_the_namespace() -> None:
    health = Health()
    Outstanding(health, 10.0, is_read=True).answered(10.001, failed=True, lost=True)
    assert (health.answers, health.errors) == (0, 0)


def test_only_what_was_waited_for_to_the_end_is_late() -> None:
    """The rest of a value whose header proved wrong is given up at once, time and again."""
    health = Health()
    for number in range(3 * LATE_BEFORE_PAUSE):
        asked = Outstanding(health, float(number), is_read=True)
        asked.given_up(number + 0.001)  # nobody ever waited for it
        asked.wait_until(number + 0.05)
        asked.given_up(number + 0.01)
    assert health.late_answers == 0
    assert not health.is_paused
    for number in range(LATE_BEFORE_PAUSE):
        asked = Outstanding(health, float(number), is_read=True)
        asked.given_up(asked.wait_until(number + 0.05))
    assert health.late_answers == LATE_BEFORE_PAUSE
    assert health.is_paused


def test_how_long_an_answer_took_counts_where_it_was_waited_for() -> None:
    """Of reads that leave together the later ones lie in the socket while the first are opened."""
    health = Health()
    for waited in (None, 0.004, 0.001):
        Outstanding(health, 10.0, is_read=True).answered(10.005, failed=False, waited=waited)
    assert health.answers == 3
    assert sum(health.reads_took) == 2
    health.breaker.late_in_a_row = 5
    Outstanding(health, 10.0, is_read=True).answered(10.005, failed=False, waited=0.0)
    assert not health.is_paused, "the answer ends a pause all the same"
