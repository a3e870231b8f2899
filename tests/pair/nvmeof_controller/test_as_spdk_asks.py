"""The commands with which SPDK's host attaches to an enclosure, and those with which it leaves.

In the order of v26.09-pre (lib/nvme/nvme_ctrlr.c), with all command sets enabled (CC.CSS 110b), as it chooses
where CAP offers them.
"""

from __future__ import annotations

import pytest

from emulator.jbof.kv_drive import KvDrive
from emulator.jbof.kv_values import MemoryValues
from nvmeof.controller.subsystem import KvNamespace
from nvmeof.wire.features import Feature
from nvmeof.wire.identify import (
    CommandSet,
    decode_identify_namespace_untrusted,
    decode_namespace_descriptors_untrusted,
    decode_namespace_list_untrusted,
)
from nvmeof.wire.properties import Property
from nvmeof.wire.sqe import AdminOpcode, Sqe
from nvmeof.wire.status import Status
from tests.support.nvme.entries import transport
from tests.support.nvme.heap_storage import HeapStorage
from tests.support.nvme.raw_host import RawHost, make_target

ALL_SETS = 0x0046_0061
SHUTDOWN = 0x0046_4061
ZONED = 2


@pytest.fixture
def host() -> RawHost:
    target, subsystem = make_target(HeapStorage())
    drive = KvDrive(1, MemoryValues(), nguid=b"\6" * 16, capacity_bytes=1 << 20, value_max=1 << 17, seed=5)
    target.attach(subsystem, KvNamespace(2, drive))
    found = RawHost(target)
    assert found.connect(kato=10_000).status == 0
    return found


def identify(host: RawHost, cns: int, nsid: int = 0, csi: int = 0) -> tuple[int, bytes]:
    sqe = Sqe(AdminOpcode.IDENTIFY, 4, nsid, transport(4096), cdw10=cns, cdw11=csi << 24)
    cqe, data = host.command(sqe)
    return cqe.status, data


def set_feature(host: RawHost, feature: int, value: int) -> int:
    sqe = Sqe(AdminOpcode.SET_FEATURES, 5, 0, transport(0), cdw10=feature, cdw11=value)
    return host.status(sqe)


def test_it_attaches_with_a_kv_drive_left_out_and_leaves_as_it_does(host: RawHost) -> None:
    assert host.property_set(Property.CC, ALL_SETS) == 0
    assert host.property_get(Property.CSTS) == 1
    assert identify(host, 1)[0] == 0
    assert set_feature(host, Feature.ASYNC_EVENT_CONFIG, 0x100) == 0
    events = range(20, 24)
    for cid in events:
        host.submit(Sqe(AdminOpcode.ASYNC_EVENT_REQUEST, cid, 0, transport(0)))
    assert set_feature(host, Feature.KEEP_ALIVE_TIMER, 10_000) == 0
    assert identify(host, 6)[0] == 0
    assert identify(host, 6, csi=ZONED)[0] == Status.INVALID_FIELD
    assert identify(host, 6, csi=CommandSet.KEY_VALUE)[0] == 0
    assert set_feature(host, Feature.QUEUE_COUNT, 0) == 0
    listed = decode_namespace_list_untrusted(identify(host, 2)[1])
    # A refusal of any of these is the end of its attempt; a namespace of no blocks is left out.
    structures = {nsid: identify(host, 0, nsid) for nsid in listed}
    assert all(status == 0 for status, _ in structures.values())
    seen = [nsid for nsid, (_, data) in structures.items() if decode_identify_namespace_untrusted(data).nsze]
    assert seen == [1]
    descriptors = decode_namespace_descriptors_untrusted(identify(host, 3, 1)[1])
    assert descriptors.command_set == CommandSet.NVM
    # The end: Property Set of CC, and Property Get under the id of an event request that is still out.
    assert host.property_set(Property.CC, SHUTDOWN) == 0
    for cid in events:
        asking = Sqe(AdminOpcode.FABRICS, cid, 4, transport(0), cdw11=Property.CSTS)
        answer, _ = host.command(asking)
        assert (answer.cid, answer.status, answer.result & 0xC) == (cid, 0, 8)
