"""Two enclosures that show one namespace: which is used, and that no copy displaces what is in use."""

from __future__ import annotations

from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from nvmeof.host.namespaces import NamespaceInfo
from tests.support.pool.fabric_of_one import NGUID, pool_on, used
from tests.support.pool.memory_pool import nguid_of

OTHER = nguid_of(2)


def shelf(name: str, *, discovered: bool = False, nqn: str = "") -> Enclosure:
    seen = (NamespaceInfo(1, NGUID, 1 << 20, 4096),)
    return Enclosure(
        name, session=object(), nqn=nqn or f"nqn.{name}", namespaces=seen, discovered=discovered  # type: ignore[arg-type]
    )  # fmt: skip


def come(fabric: Fabric, enclosure: Enclosure) -> None:
    fabric.enclosures = [*fabric.enclosures, enclosure]


def test_a_copy_by_discovery_displaces_no_enclosure_of_the_configuration() -> None:
    original, copy = shelf("own"), shelf("pod.copy", discovered=True)
    fabric = pool_on(original)
    come(fabric, copy)
    assert used(fabric) == ["own"]
    assert "pod.copy shows it as well as own: left out" in fabric.contested[NGUID.hex()]
    # Nor while the original is away: what it acknowledged would be gone, and what is put now after that.
    original.session, session = None, original.session
    assert used(fabric) == []
    assert "own is away" in fabric.contested[NGUID.hex()]
    original.session = session
    assert used(fabric) == ["own"]
    copy.session = None
    assert used(fabric) == ["own"]
    assert fabric.contested == {}


def test_a_copy_does_not_displace_one_that_was_discovered_before() -> None:
    original, copy = shelf("pod.own", discovered=True), shelf("pod.copy", discovered=True)
    fabric = pool_on(original)
    come(fabric, copy)
    assert used(fabric) == ["pod.own"]
    original.session = None
    assert used(fabric) == []
    # Listed no longer and forgotten: the drive is in another shelf now.
    fabric.enclosures = [copy]
    assert used(fabric) == ["pod.copy"]


def test_a_drive_that_moves_to_another_shelf_is_followed() -> None:
    before, after = shelf("own"), shelf("pod.new", discovered=True)
    fabric = pool_on(before)
    before.namespaces = (NamespaceInfo(1, OTHER, 1 << 20, 4096),)
    come(fabric, after)
    assert used(fabric) == ["pod.new"]
    assert fabric.contested == {}


def test_of_two_by_discovery_neither_is_used_where_none_was_before() -> None:
    fabric = pool_on(shelf("pod.a", discovered=True), shelf("pod.b", discovered=True))
    assert used(fabric) == []
    assert "none of them is used" in fabric.contested[NGUID.hex()]
    come(fabric, shelf("own"))
    assert used(fabric) == ["own"], "the operator's word settles it"


def test_what_the_configuration_names_comes_before_what_was_discovered_first() -> None:
    fabric = pool_on(shelf("pod.copy", discovered=True))
    assert used(fabric) == ["pod.copy"]
    come(fabric, shelf("own"))
    assert used(fabric) == ["own"]


def test_paths_to_one_subsystem_are_no_copies() -> None:
    nqn = "nqn.x:one"
    fabric = pool_on(shelf("own", nqn=nqn))
    come(fabric, shelf("pod.path", nqn=nqn, discovered=True))
    assert used(fabric) == ["own"], "not shown yet to be one (test_verified_paths.py)"
    [unproven] = fabric.unproven()
    fabric.found(unproven, True)
    assert used(fabric) == ["own", "pod.path"]
    assert fabric.contested == {}
    fabric.enclosures[0].session = None
    assert used(fabric) == ["pod.path"]
