"""Shares of what strangers can raise: a newcomer finds room, the owner's part stays, and the sums add up."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agent.host_os.per_user_bounds import ALL, CATALOGUE, SHARED, Bound, Bounds, Limit


def limit_of(share: str = SHARED, most: int = 1024) -> Limit:
    made = Limit("of a test", "things", most, by="user", share=share, refused="ENFILE", bytes_each=1)
    del CATALOGUE["of a test"]
    return made


def taken(bound: Bound, holder: int | str) -> int:
    """How many a holder gets that takes all it can."""
    count = 0
    while bound.take(holder):
        count += 1
    return count


def test_who_takes_all_that_it_can_leaves_as_much_to_others() -> None:
    bound = Bound(limit_of(), 1024, frozenset({0}))
    assert [taken(bound, user) for user in (7, 8, 9)] == [448, 224, 112]
    assert bound.held == 784
    assert bound.refusals == 3


def test_strangers_together_leave_the_owners_part() -> None:
    bound = Bound(limit_of(), 1024, frozenset({0}))
    assert sum(taken(bound, user) for user in range(1, 200)) == 1024 - 1024 // 8
    assert taken(bound, 0) == 128


def test_the_owner_may_have_all_and_then_nobody_else_has_any() -> None:
    bound = Bound(limit_of(), 16, frozenset({0}))
    assert taken(bound, 0) == 16
    assert not bound.take(7)
    bound.give_back(0)
    assert bound.take(7)


def test_without_shares_it_is_the_sum_that_counts() -> None:
    bound = Bound(limit_of(ALL), 8)
    assert taken(bound, "one") == 8


def test_what_is_passed_on_is_the_heirs() -> None:
    bound = Bound(limit_of(), 8, frozenset({"known"}))
    for _ in range(6):
        assert bound.take("10.0.0.1")
        bound.pass_on("10.0.0.1", "known")
    assert bound.snapshot()["most_of_one"] == 6
    for _ in range(6):
        bound.give_back("known")
    assert bound.held == 0


@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(1, 40)), max_size=200),
)
def test_the_sum_is_never_more_than_the_limit_and_what_was_taken_is_given_back(
    most: int, moves: list[tuple[int, bool, int]]
) -> None:
    bound = Bound(limit_of(), most, frozenset({0}))
    held = dict.fromkeys(range(5), 0)
    for user, takes, count in moves:
        if takes and bound.take(user, count):
            held[user] += count
        elif not takes and held[user] >= count:
            bound.give_back(user, count)
            held[user] -= count
        assert bound.held == sum(held.values()) <= most
    found = bound.snapshot()
    assert (found["held"], found["most_of_one"]) == (sum(held.values()), max(held.values()))


def test_more_than_was_taken_cannot_be_given_back() -> None:
    bound = Bound(limit_of(), 4)
    with pytest.raises(AssertionError, match="more is given back"):
        bound.give_back(1)


def test_doors_share_one_bound_and_all_are_shown() -> None:
    bounds, limit = Bounds(), limit_of()
    assert bounds.of(limit) is bounds.of(limit)
    bounds.watch(limit_of(ALL), lambda: {"a": 3, "b": 0}, lambda: 2, most=9)
    assert [row["held"] for row in bounds.snapshot()] == [0, 3]
