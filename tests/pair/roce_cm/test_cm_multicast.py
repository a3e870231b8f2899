"""Multicast groups by the connection manager: nobody is asked, and the event says where to send."""

from __future__ import annotations

import errno

import pytest

from emulator.roce.cm.events import CmEventType
from emulator.roce.cm.limits import MAX_GROUPS
from emulator.roce.cm.service_resolution import UDP_QKEY, ServiceResolution
from emulator.roce.nic.multicast import MULTICAST_QPN
from emulator.roce.nic.verbs import VerbsError
from emulator.roce.wire.cm_ip import PortSpace
from tests.support.roce.connection_managers import SECOND, CmPair

GROUP = "239.1.2.3"


def _resolved(pair: CmPair) -> ServiceResolution:
    service = pair.first.manager.create(pair.first.events.append, PortSpace.UDP)
    assert isinstance(service, ServiceResolution)
    service.resolve_address(GROUP, 0, PortSpace.UDP)
    pair.first.events.clear()
    return service


def test_a_joined_group_is_told_with_its_queue_pair_and_q_key() -> None:
    pair = CmPair()
    service = _resolved(pair)
    calls: list[str] = []
    service.join_multicast(GROUP, lambda: calls.append("attached"))
    service.join_multicast("239.1.2.4", None)
    assert calls == ["attached"]
    for event, group in zip(pair.first.events, (GROUP, "239.1.2.4"), strict=True):
        assert (event.type, event.status, event.group) == (CmEventType.MULTICAST_JOIN, 0, group)
        assert event.parameters is not None
        assert (event.parameters.qp_num, event.parameters.qkey) == (MULTICAST_QPN, UDP_QKEY)
    assert service.leave_multicast(GROUP)
    assert not service.leave_multicast("239.1.2.4"), "who only sends has nothing to detach"
    with pytest.raises(VerbsError) as refused:
        service.leave_multicast(GROUP)
    assert refused.value.errno == errno.EADDRNOTAVAIL
    pair.network.run(most_seconds=1.0)
    assert pair.network.counters.sent == 0, "no message of the connection manager"


def test_a_queue_pair_that_cannot_be_attached_is_an_event() -> None:
    pair = CmPair()
    service = _resolved(pair)

    def refuse() -> None:
        raise VerbsError(errno.ENOMEM, "no more groups")

    service.join_multicast(GROUP, refuse)
    (event,) = pair.first.events
    assert (event.type, event.status, event.group) == (CmEventType.MULTICAST_ERROR, -errno.ENOMEM, GROUP)
    with pytest.raises(VerbsError):
        service.leave_multicast(GROUP)


@pytest.mark.parametrize("group", [SECOND, "ff0e::1", "nothing", ""])
def test_what_is_no_group_is_refused(group: str) -> None:
    pair = CmPair()
    with pytest.raises(VerbsError) as refused:
        _resolved(pair).join_multicast(group, None)
    assert refused.value.errno == errno.EINVAL
    assert not pair.first.events


def test_groups_need_a_resolved_address_and_have_a_bound() -> None:
    pair = CmPair()
    service = pair.first.manager.create(pair.first.events.append, PortSpace.UDP)
    assert isinstance(service, ServiceResolution)
    with pytest.raises(VerbsError) as refused:
        service.join_multicast(GROUP, None)
    assert refused.value.errno == errno.EINVAL
    service = _resolved(pair)
    for number in range(MAX_GROUPS):
        service.join_multicast(f"239.1.3.{number}", None)
    service.join_multicast("239.1.3.0", None)
    with pytest.raises(VerbsError) as refused:
        service.join_multicast(GROUP, None)
    assert refused.value.errno == errno.ENOMEM
