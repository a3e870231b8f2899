"""Paths of one name: which are used, what has to be shown first, and that none takes over before that."""

from __future__ import annotations

from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from agent.remote.verified_paths import Unproven
from nvmeof.host.namespaces import NamespaceInfo
from tests.support.pool.fabric_of_one import NGUID, pool_on, used

SEEN = (NamespaceInfo(1, NGUID, 1 << 20, 4096),)


def path(name: str, *, discovered: bool = True, connected: bool = True) -> Enclosure:
    it = Enclosure(name, nqn="nqn.shelf", namespaces=SEEN, discovered=discovered, epoch=1)
    it.session = object() if connected else None  # type: ignore[assignment]
    return it


def named(name: str, *, connected: bool = True) -> Enclosure:
    return path(name, discovered=False, connected=connected)


def only_question(fabric: Fabric) -> Unproven:
    fabric.refresh()
    [unproven] = fabric.unproven()
    return unproven


def come(fabric: Fabric, enclosure: Enclosure) -> None:
    fabric.enclosures = [*fabric.enclosures, enclosure]


def go(*enclosures: Enclosure) -> None:
    for enclosure in enclosures:
        enclosure.session = None


def back(enclosure: Enclosure) -> None:
    enclosure.session, enclosure.epoch = object(), enclosure.epoch + 1  # type: ignore[assignment]


def test_paths_of_the_configuration_are_the_operators_word() -> None:
    fabric = pool_on(first := named("own"), named("own#2"))
    assert used(fabric) == ["own", "own#2"]
    assert fabric.unproven() == ()
    go(first)
    assert used(fabric) == ["own#2"]


def test_a_discovered_path_is_used_once_it_was_shown_and_takes_over_then() -> None:
    own, other = named("own"), path("pod.a")
    fabric = pool_on(own, other)
    assert used(fabric) == ["own"]
    assert fabric.contested == {}, "nothing speaks against it yet"
    question = only_question(fabric)
    assert (question.by.enclosure, question.path.enclosure) == (own, other)
    fabric.found(question, True)
    assert used(fabric) == ["own", "pod.a"]
    assert fabric.unproven() == ()
    go(own)
    assert used(fabric) == ["pod.a"]
    # What comes back is the operator's word still.
    back(own)
    assert used(fabric) == ["own", "pod.a"]
    # A new session of the other may lead elsewhere.
    go(other)
    back(other)
    assert used(fabric) == ["own"]
    assert only_question(fabric).epochs == (2, 2)


def test_a_path_that_was_never_shown_does_not_take_over() -> None:
    own, other = named("own"), path("pod.a")
    fabric = pool_on(own, other)
    go(own)
    assert used(fabric) == []
    assert fabric.contested == {NGUID.hex(): "pod.a listed as a way to it while own is away: not used"}
    # Nor where what the configuration names was never there.
    late = pool_on(named("own", connected=False), path("pod.a"))
    assert used(late) == []
    back(own)
    assert used(fabric) == ["own"]
    assert fabric.contested == {}


def test_a_copy_by_the_name_of_the_original_is_left_out_and_told_of() -> None:
    own, copy = named("own"), path("pod.copy")
    fabric = pool_on(own, copy)
    fabric.found(only_question(fabric), False)
    assert used(fabric) == ["own"]
    assert fabric.unproven() == ()
    said = "pod.copy says that it is a path of own and is another: left out"
    assert fabric.contested == {NGUID.hex(): said}
    go(own)
    assert used(fabric) == []
    back(own)
    # It is asked again once its own session is new.
    assert used(fabric) == ["own"]
    assert fabric.unproven() == ()
    go(copy)
    back(copy)
    assert only_question(fabric).path.enclosure is copy


def test_what_was_found_of_an_earlier_session_does_not_count() -> None:
    for index in range(2):
        paths = named("own"), path("pod.a")
        fabric = pool_on(*paths)
        question = only_question(fabric)
        go(paths[index])
        back(paths[index])
        fabric.found(question, True)
        assert used(fabric) == ["own"]


def test_where_all_are_by_discovery_the_first_by_name_begins() -> None:
    b, a = path("pod.b"), path("pod.a")
    fabric = pool_on(b, a)
    assert used(fabric) == ["pod.a"]
    fabric.found(only_question(fabric), True)
    assert used(fabric) == ["pod.b", "pod.a"]
    # All went: what was in use before goes on, and the others are shown again.
    go(a, b)
    assert used(fabric) == []
    back(b)
    assert used(fabric) == ["pod.b"]
    back(a)
    assert used(fabric) == ["pod.b"]
    fabric.found(only_question(fabric), True)
    assert used(fabric) == ["pod.b", "pod.a"]


def test_of_two_by_discovery_that_are_two_from_the_start_neither_is_used() -> None:
    a, b = path("pod.a"), path("pod.b")
    fabric = pool_on(a, b)
    fabric.found(only_question(fabric), False)
    assert used(fabric) == []
    assert "none of them is used" in fabric.contested[NGUID.hex()]
    go(a)
    assert used(fabric) == [], "the other may be the copy"
    fabric.enclosures = [b]
    assert used(fabric) == ["pod.b"], "listed no longer"


def test_one_that_was_in_use_before_stays_where_a_copy_of_it_comes() -> None:
    fabric = pool_on(first := path("pod.b"))
    assert used(fabric) == ["pod.b"]
    come(fabric, path("pod.a"))
    assert used(fabric) == ["pod.b"]
    fabric.found(only_question(fabric), False)
    assert used(fabric) == ["pod.b"]
    assert "pod.a says that it is a path of pod.b and is another" in fabric.contested[NGUID.hex()]
    go(first)
    assert used(fabric) == []
    assert "while pod.b is away" in fabric.contested[NGUID.hex()]
