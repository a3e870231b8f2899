"""The fabric tells suspicion which namespaces share an enclosure."""

from __future__ import annotations

from agent.remote.circuit_breaker import Health
from agent.remote.enclosure import Enclosure, Route
from agent.remote.fabric import Fabric
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
