"""What a target may change while hosts are connected: ports, allowed hosts, names of namespaces."""

from __future__ import annotations

import pytest

from nvmeof.controller.subsystem import Namespace, Subsystem
from nvmeof.controller.target import Target
from nvmeof.wire.log_page import DiscoveryEntry
from tests.support.nvme.heap_storage import HeapStorage

NQN, OTHER = "nqn.2026-01.io.g35:one", "nqn.2026-01.io.g35:other"


@pytest.fixture
def target() -> Target:
    made = Target()
    for nqn in (NQN, OTHER):
        made.add_subsystem(Subsystem(nqn, serial="s"))
    return made


def shown(target: Target, host: str = "nqn.host") -> list[tuple[str, str]]:
    return [(entry.subsystem_nqn, entry.service) for entry in target.discovery_log(host).entries]


def test_a_port_is_listed_for_its_subsystem_and_no_longer_than_it_is_there(target: Target) -> None:
    target.add_port(DiscoveryEntry("127.0.0.1", "1"))
    target.add_port(DiscoveryEntry("127.0.0.1", "2", subsystem_nqn=NQN))
    assert sorted(shown(target)) == [(NQN, "1"), (NQN, "2"), (OTHER, "1")]
    generation = target.discovery_log("nqn.host").generation
    target.remove_port(DiscoveryEntry("127.0.0.1", "1"))
    assert shown(target) == [(NQN, "2")]
    assert target.discovery_log("nqn.host").generation > generation
    with pytest.raises(KeyError):
        target.remove_port(DiscoveryEntry("127.0.0.1", "1"))
    assert [port.service for port in target.ports] == ["2"]


def test_hosts_that_are_let_in_no_more_see_nothing(target: Target) -> None:
    target.add_port(DiscoveryEntry("127.0.0.1", "1", subsystem_nqn=NQN))
    [one, _] = target.subsystems
    target.set_allowed_hosts(one, ["nqn.friend"])
    assert (shown(target), shown(target, "nqn.friend")) == ([], [(NQN, "1")])
    target.set_allowed_hosts(one, None)
    assert shown(target) == [(NQN, "1")]


def test_a_namespace_may_have_other_names_than_its_storage(target: Target) -> None:
    [one, _] = target.subsystems
    storage = HeapStorage()
    assert Namespace(1, storage).nguid == storage.nguid
    named = Namespace(2, storage, nguid=b"n" * 16, uuid=b"u" * 16)
    target.attach(one, named)
    assert (named.nguid, named.uuid) == (b"n" * 16, b"u" * 16)
