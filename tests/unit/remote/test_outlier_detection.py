"""Gray failure: what makes a namespace a suspect, what it means for it, and how it comes back."""

from __future__ import annotations

import math
import random
import time

from hypothesis import given
from hypothesis import strategies as st

from agent.remote.circuit_breaker import LATE_BEFORE_PAUSE, LATENCY_BUCKETS, Health
from agent.remote.outlier_detection import (
    HOLD_FIRST_SECONDS,
    HOLD_MAX_SECONDS,
    LOOK_SECONDS,
    PROBATION_SECONDS,
    Change,
    OutlierDetection,
    Verdict,
)


class Pool:
    """Namespaces that are asked 50 times between two looks; `took` seconds, `errors` and `late` of each."""

    def __init__(self, members: int = 8) -> None:
        self.health = [Health() for _ in range(members)]
        self.outliers = OutlierDetection(self.health)
        self.took = [0.0005] * members
        self.errors_in_a_hundred = [0] * members
        self.late = [0] * members
        self.asked = 50
        self.now = 100.0
        self.dice = random.Random(35)

    def look(self) -> list[Change]:
        for member, health in enumerate(self.health):
            for _ in range(self.asked):
                failed = self.dice.random() * 100 < self.errors_in_a_hundred[member]
                health.answered(self.took[member] * self.dice.uniform(0.7, 1.3), read=True, failed=failed)
            for _ in range(self.late[member]):
                health.late(self.now)
        self.now += LOOK_SECONDS
        return self.judge()

    def judge(self) -> list[Change]:
        return self.outliers.look(self.now)

    def looks(self, seconds: float) -> list[Change]:
        return [change for _ in range(math.ceil(seconds / LOOK_SECONDS)) for change in self.look()]


def verdicts(changes: list[Change]) -> list[tuple[int, Verdict]]:
    return [(change.member, change.verdict) for change in changes]


def test_those_who_do_alike_are_trusted_whatever_it_is_that_they_do() -> None:
    for took in (1e-9, 0.0005, 0.1, 100.0):
        pool = Pool()
        pool.took = [took] * 8
        assert pool.looks(10) == []
        assert all(health.trusted and health.patience == math.inf for health in pool.health)


def test_one_that_is_slower_than_its_peers_is_noticed_within_a_second_and_waited_for_less() -> None:
    pool = Pool()
    pool.looks(2)
    pool.took[3] = 0.02
    changes = pool.looks(1.5)
    assert verdicts(changes) == [(3, Verdict.SUSPECT)]
    assert "half of its reads take over" in changes[0].why
    assert not pool.health[3].trusted
    assert 0.001 < pool.health[3].patience < 0.01
    assert all(health.trusted for member, health in enumerate(pool.health) if member != 3)


def test_a_little_slower_is_not_sick() -> None:
    pool = Pool()
    pool.took[3] = 0.0015  # three times its peers'
    pool.took[4] = 0.0019  # four times, and still quick
    assert pool.looks(10) == []


class PoolBesideAnSsd(Pool):
    """Namespace 0 is this machine's own; the others lie in enclosures of two each."""

    def judge(self) -> list[Change]:
        where = [member if not member else f"shelf {(member + 1) // 2}" for member in range(len(self.health))]
        return self.outliers.look(self.now, where, {0})


def test_a_namespace_of_this_machine_is_no_peer_of_those_over_the_fabric() -> None:
    """Where the network or this machine is slow, an SSD in place is not."""
    for members in (2, 3, 5):
        pool = PoolBesideAnSsd(members)
        pool.took = [0.00008] + [0.02] * (members - 1)
        assert pool.looks(10) == []
        assert all(health.trusted for health in pool.health)


def test_beside_a_namespace_of_this_machine_the_others_are_judged_by_each_other() -> None:
    pool = PoolBesideAnSsd(5)
    pool.took = [0.00008, 0.0005, 0.0005, 0.02, 0.0005]
    assert verdicts(pool.looks(2)) == [(3, Verdict.SUSPECT)]
    assert pool.health[3].patience > 0.001, "as those over the fabric take, not as the SSD in place"
    pool = PoolBesideAnSsd(5)
    pool.took = [0.00008, 0.02, 0.02, 0.0005, 0.0005]
    assert sorted(verdicts(pool.looks(2))) == [(1, Verdict.SUSPECT), (2, Verdict.SUSPECT)]


def test_a_namespace_of_this_machine_that_is_slower_than_those_over_the_fabric_is_noticed() -> None:
    pool = PoolBesideAnSsd(5)
    pool.took = [0.02, 0.0005, 0.0005, 0.0005, 0.0005]
    assert verdicts(pool.looks(2)) == [(0, Verdict.SUSPECT)]


def test_one_error_in_a_hundred_is_noticed() -> None:
    pool = Pool()
    pool.errors_in_a_hundred[0] = 1
    changes = pool.looks(10)
    assert verdicts(changes)[0] == (0, Verdict.SUSPECT)
    assert "errors" in changes[0].why


def test_late_answers_are_noticed_and_a_pause_at_once() -> None:
    pool = Pool()
    pool.late[2] = 15
    pool.asked = 50
    pool.health[2].breaker.late_in_a_row = -1000  # the breaker does not open
    assert verdicts(pool.looks(1)) == [(2, Verdict.SUSPECT)]
    pool = Pool()
    for _ in range(LATE_BEFORE_PAUSE):
        pool.health[5].late(pool.now)
    pool.asked = 0
    assert verdicts(pool.look()) == [(5, Verdict.SUSPECT)]


def test_half_of_the_pool_being_slow_convicts_nobody_that_is_usual() -> None:
    """With one enclosure of two slow, the slow half is found; with most of a pool slow, nobody is."""
    pool = Pool(4)
    pool.took = [0.0005, 0.0005, 0.05, 0.05]
    assert sorted(verdicts(pool.looks(2))) == [(2, Verdict.SUSPECT), (3, Verdict.SUSPECT)]
    pool = Pool(4)
    pool.took = [0.0005, 0.05, 0.05, 0.05]
    assert pool.looks(2) == []


def test_what_has_no_peers_is_judged_by_errors_and_lateness_only() -> None:
    pool = Pool(1)
    pool.took[0] = 5.0
    assert pool.looks(5) == []
    pool.errors_in_a_hundred[0] = 50
    assert verdicts(pool.looks(2)) == [(0, Verdict.SUSPECT)]
    assert pool.health[0].patience == math.inf, "nobody knows how long is usual"


def test_a_suspect_comes_back_on_probation_and_falls_again_for_longer() -> None:
    pool = Pool()
    pool.asked = 12
    hold = HOLD_FIRST_SECONDS
    for _ in range(8):
        pool.took[1] = 0.05
        assert verdicts(pool.looks(2)) == [(1, Verdict.SUSPECT)]
        pool.took[1] = 0.0005
        began = pool.now
        changes: list[Change] = []
        while not changes:
            changes = pool.look()
        assert verdicts(changes) == [(1, Verdict.PROBATION)]
        assert hold <= pool.now - began < hold + 5
        assert pool.health[1].trusted
        hold = min(2 * hold, HOLD_MAX_SECONDS)
    assert verdicts(pool.looks(PROBATION_SECONDS + 1)) == [(1, Verdict.TRUSTED)]
    pool.took[1] = 0.05
    pool.looks(2)
    pool.took[1] = 0.0005
    assert verdicts(pool.looks(HOLD_FIRST_SECONDS + 3)) == [(1, Verdict.PROBATION)], "the past is forgiven"


def test_a_suspect_that_nobody_asks_comes_back_as_well() -> None:
    pool = Pool()
    pool.took[1] = 0.05
    pool.looks(2)
    pool.asked = 0
    assert verdicts(pool.looks(HOLD_FIRST_SECONDS + 5)) == [(1, Verdict.PROBATION)]


def test_few_reads_convict_nobody() -> None:
    pool = Pool()
    pool.asked = 2
    pool.took[0] = 0.04
    assert pool.looks(5) == []


def test_a_pod_is_looked_at_in_a_small_part_of_the_interval() -> None:
    pool = Pool(36 * 32)
    pool.asked = 0
    for health in pool.health:
        health.reads_took[9] += 50
        health.answers += 50
    began = time.process_time()
    pool.outliers.look(pool.now)
    print(f"{time.process_time() - began:.4f} s for {len(pool.health)} namespaces")


@given(st.lists(st.floats(0, 1e9, allow_nan=False), max_size=50))
def test_every_latency_has_its_bucket(latencies: list[float]) -> None:
    health = Health()
    for seconds in latencies:
        health.answered(seconds, read=True)
    assert sum(health.reads_took) == health.answers == len(latencies)
    for number, count in enumerate(health.reads_took):
        low, high = 2**number / 1e6, 2 ** (number + 1) / 1e6
        last = number == LATENCY_BUCKETS - 1
        # An interval's borders are whole microseconds; what took none is in the first.
        fits = [one for one in latencies if (low <= one or number == 0) and (one < high or last)]
        assert count == len(fits)


@given(st.randoms(use_true_random=False))
def test_whatever_happens_trust_follows_the_verdict(dice: random.Random) -> None:
    pool = Pool(5)
    for _ in range(30):
        member = dice.randrange(5)
        pool.took[member] = dice.choice([0.0001, 0.001, 0.01, 0.1])
        pool.errors_in_a_hundred[member] = dice.choice([0, 0, 1, 100])
        pool.late[member] = dice.choice([0, 0, 1, 20])
        pool.asked = dice.choice([0, 1, 20])
        pool.look()
        for number, health in enumerate(pool.health):
            suspect = pool.outliers.verdict(number) is Verdict.SUSPECT
            assert health.trusted is not suspect
            assert health.patience > 0
            assert suspect or health.patience == math.inf


# -- a pod: many drives to an enclosure, each of them asked seldom ------------------------------------


class Pod(Pool):
    """Enclosures of eight drives; each drive is asked about once between two looks."""

    def __init__(self, enclosures: int = 6) -> None:
        super().__init__(8 * enclosures)
        self.asked = 1
        self.where = [f"shelf{member // 8}" for member in range(8 * enclosures)]

    def judge(self) -> list[Change]:
        return self.outliers.look(self.now, self.where)

    def ail(self, enclosure: int, *, took: float = 0.0005, late: int = 0) -> None:
        for member in range(8 * enclosure, 8 * enclosure + 8):
            self.took[member], self.late[member] = took, late


def suspects(pool: Pool) -> list[int]:
    return [member for member, health in enumerate(pool.health) if not health.trusted]


def test_a_slow_enclosure_is_seen_where_no_drive_is_asked_often_enough_to_be() -> None:
    pod = Pod()
    pod.looks(2)
    pod.ail(2, took=0.02)
    changes = pod.looks(1.5)
    assert suspects(pod) == list(range(16, 24))
    assert all("its enclosure" in change.why for change in changes)
    assert all(pod.health[member].patience < 0.01 for member in suspects(pod))


def test_a_stopped_enclosure_is_seen_within_two_looks() -> None:
    pod = Pod()
    pod.looks(2)
    pod.ail(1, late=1)
    pod.asked = 0
    pod.looks(2 * LOOK_SECONDS)
    assert suspects(pod) == list(range(8, 16))


def test_one_sick_drive_casts_no_suspicion_on_its_neighbours() -> None:
    for took, late, errors in ((0.05, 0, 0), (0.0005, 40, 0), (0.0005, 0, 30)):
        pod = Pod()
        pod.asked = 20
        pod.looks(2)
        pod.took[3], pod.late[3], pod.errors_in_a_hundred[3] = took, late, errors
        pod.looks(5)
        assert suspects(pod) == [3]


def test_of_two_drives_one_does_not_speak_for_both() -> None:
    pod = Pod()
    pod.where = [f"shelf{member // 2}" for member in range(48)]
    pod.asked = 20
    pod.took[3] = 0.05
    pod.looks(5)
    assert suspects(pod) == [3]


def test_an_enclosure_that_is_well_again_comes_back() -> None:
    pod = Pod()
    pod.looks(2)
    pod.ail(2, took=0.02)
    pod.looks(2)
    pod.ail(2)
    changes = pod.looks(HOLD_FIRST_SECONDS + 3)
    assert {change.verdict for change in changes} == {Verdict.PROBATION}
    assert suspects(pod) == []
