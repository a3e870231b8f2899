"""What the threads of a door wait in vain for slow clients is a small share of their time."""

from __future__ import annotations

from agent.http.patience import OF_A_CLIENT_SECONDS, REST_FACTOR, SOON_SECONDS, WAIT_SECONDS, Patience


def test_nobody_waits_for_a_while_after_a_wait_in_vain() -> None:
    now = 100.0
    patience = Patience(lambda: now)
    assert patience.until() == now + WAIT_SECONDS
    now += WAIT_SECONDS
    assert patience.waited_in_vain(100.0) == now + OF_A_CLIENT_SECONDS
    assert patience.until() == now
    now += REST_FACTOR * WAIT_SECONDS * 0.99
    assert patience.until() == now
    now += REST_FACTOR * WAIT_SECONDS * 0.02
    assert patience.until() == now + WAIT_SECONDS


def test_a_crowd_of_slow_clients_takes_a_sixth_of_a_thread() -> None:
    now = waited = 0.0
    patience = Patience(lambda: now)
    while now < 100.0:
        began, until = now, patience.until()
        waited += until - now
        now = until
        if until > began:
            patience.waited_in_vain(began)
        now += 0.0001
    assert waited < 100.0 / (1 + REST_FACTOR) + WAIT_SECONDS


def test_clients_who_take_all_at_the_last_moment_take_half_of_a_thread() -> None:
    now = waited = 0.0
    patience = Patience(lambda: now)
    while now < 100.0:
        began = now
        if patience.until() > began:
            now += 0.95 * WAIT_SECONDS
            waited += now - began
            patience.waited(began)
        now += 0.0001
    assert waited < 100.0 / 2 + WAIT_SECONDS


def test_a_client_who_is_quick_costs_nothing() -> None:
    now = 0.0
    patience = Patience(lambda: now)
    now += SOON_SECONDS
    patience.waited(0.0)
    assert patience.until() == now + WAIT_SECONDS
