"""The fabric tells suspicion which namespaces share an enclosure."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from agent.remote.circuit_breaker import Health
from agent.remote.enclosure import Enclosure, Route
from agent.remote.fabric import Fabric
from agent.remote.outlier_detection import OutlierDetection
from nvmeof.host.namespaces import NamespaceInfo
from nvmeof.transport.base import ControllerInfo
from tests.support.pool.memory_pool import nguid_of


def test_namespaces_of_one_enclosure_are_judged_together() -> None:
    """Each is read too seldom to be judged alone; one enclosure is slow, and one namespace is nowhere."""
    enclosures = [Enclosure(name) for name in ("slow", "well", "good")]
    fabric = Fabric(enclosures)
    fabric.adopt([nguid_of(number) for number in range(25)])
    fabric.routes = tuple(
        Route(enclosures[number // 8], number % 8 + 1, 4096) if number < 24 else None for number in range(25)
    )
    now, suspects = 100.0, list[Health]()
    for _ in range(8):
        for number, health in enumerate(fabric.health[:24]):
            health.answered(0.03 if number < 8 else 0.0005, read=True)
        now += 0.25
        fabric.look(now)
        suspects = [health for health in fabric.health if not health.trusted]
    assert suspects == list(fabric.health[:8])


def test_an_ssd_of_this_machine_makes_no_suspect_of_those_over_the_fabric() -> None:
    enclosures = [Enclosure("local:ssd", is_local=True), Enclosure("shelf")]
    fabric = Fabric(enclosures)
    fabric.adopt([nguid_of(number) for number in range(2)])
    fabric.routes = tuple(Route(enclosure, 1, 4096) for enclosure in enclosures)
    now = 100.0
    for _ in range(8):
        for health, took in zip(fabric.health, (0.0001, 0.03), strict=True):
            for _ in range(8):
                health.answered(took, read=True)
        now += 0.25
        assert fabric.look(now) == []


def shelf_with(*numbers: int) -> Enclosure:
    """A connected enclosure that shows these namespaces."""
    shelf = Enclosure(f"shelf {numbers}", cast(ControllerInfo, object()))
    shelf.namespaces = tuple(NamespaceInfo(n + 1, nguid_of(n), 1 << 20, 4096) for n in numbers)
    return shelf


def test_no_namespace_is_new_or_unseen_before_there_is_a_pool_map() -> None:
    """An enclosure that connects amid the first look round may show namespaces of the pool itself."""
    fabric = Fabric([shelf_with(0)])
    fabric.refresh()
    assert not fabric.newcomers()
    fabric.adopt([nguid_of(0), nguid_of(2)], is_pool=False)
    fabric.enclosures = [*fabric.enclosures, shelf_with(1)]
    fabric.refresh()
    assert fabric.strays
    assert not fabric.newcomers()
    assert not fabric.unseen()
    fabric.adopt([nguid_of(0), nguid_of(2)])
    assert list(fabric.newcomers()) == [nguid_of(1).hex()]
    assert fabric.unseen() == {nguid_of(2)}


@pytest.mark.interpreted
def test_a_look_amid_a_change_of_the_map_finds_nothing_that_is_not_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The map changes on one thread, and the supervisor looks on another."""
    fabric = Fabric([shelf_with(0, 1)])
    found: list[object] = []
    looks: list[threading.Thread] = []

    def amid(*_: object) -> Any:
        looks.append(threading.Thread(target=lambda: found.extend((fabric.newcomers(), fabric.unseen()))))
        looks[-1].start()
        looks[-1].join(0.1)  # it waits for the change, or it would be over by then
        return (), ""

    def outliers(health: Sequence[Health]) -> OutlierDetection:
        amid()
        return OutlierDetection(health)

    with monkeypatch.context() as patch:
        patch.setattr(fabric._owners, "choose", amid)
        patch.setattr("agent.remote.fabric.OutlierDetection", outliers)
        fabric.adopt([nguid_of(0), nguid_of(1)])
        fabric.grow([nguid_of(0), nguid_of(1)])
    for look in looks:
        look.join()
    assert len(looks) == 5
    assert not any(found)
