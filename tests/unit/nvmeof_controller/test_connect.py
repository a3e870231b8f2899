"""Connect: who is let in, and with which status and pointer the others are turned away."""

from __future__ import annotations

from typing import Any

import pytest

from nvmeof.controller.settings import ControllerSettings
from nvmeof.wire.fabrics import CONNECT_DATA_BYTES, DISCOVERY_NQN, Connect, FabricsType
from nvmeof.wire.properties import Property
from nvmeof.wire.sqe import AdminOpcode, Sqe
from nvmeof.wire.status import FabricsStatus, Status
from tests.support.nvme.entries import fabrics_entry, transport
from tests.support.nvme.heap_storage import HeapStorage
from tests.support.nvme.raw_host import (
    ENABLE,
    HOST,
    SUBSYSTEM,
    RawHost,
    make_target,
    open_admin,
    open_io,
)

IN_DATA = 1 << 16


def disconnect(recfmt: int = 0) -> Sqe:
    return Sqe(AdminOpcode.FABRICS, 0, FabricsType.DISCONNECT, transport(0), cdw10=recfmt)


def test_an_admin_connect_makes_a_controller() -> None:
    target, _ = make_target(HeapStorage())
    first = RawHost(target).connect()
    second = RawHost(target).connect()
    assert (first.status, second.status) == (0, 0)
    assert first.result != second.result
    assert len(target.controllers) == 2


def test_flow_control_is_switched_off_only_on_request() -> None:
    target, _ = make_target(HeapStorage())
    assert RawHost(target).connect(cattr=4).sqhd == 0xFFFF
    assert RawHost(target).connect(cattr=0).sqhd == 1


@pytest.mark.parametrize(
    ("change", "status", "pointer"),
    [
        ({"subsystem": "nqn.2026-01.io.g35:nobody"}, FabricsStatus.CONNECT_INVALID_PARAMETERS, IN_DATA | 256),
        ({"host": "nqn.2026-01.io.g35:stranger"}, FabricsStatus.CONNECT_INVALID_HOST, 0),
        ({"cntlid": 5}, FabricsStatus.CONNECT_INVALID_PARAMETERS, IN_DATA | 16),
        ({"sqsize": 0}, FabricsStatus.CONNECT_INVALID_PARAMETERS, 44),
        ({"sqsize": 1024}, FabricsStatus.CONNECT_INVALID_PARAMETERS, 44),
        ({"recfmt": 1}, FabricsStatus.CONNECT_INCOMPATIBLE_FORMAT, 0),
        ({"qid": 1, "cntlid": 77}, FabricsStatus.CONNECT_INVALID_PARAMETERS, IN_DATA | 16),
        ({"qid": 1, "subsystem": DISCOVERY_NQN}, FabricsStatus.CONNECT_INVALID_PARAMETERS, IN_DATA | 256),
    ],
)
def test_refusals(change: dict[str, Any], status: int, pointer: int) -> None:
    target, _ = make_target(HeapStorage(), allowed_hosts=[HOST])
    host = RawHost(target)
    cqe = host.connect(**change)
    assert (cqe.status, cqe.result, cqe.do_not_retry) == (status, pointer, True)
    assert not target.controllers
    # The connection stays, and a right Connect is let in.
    assert host.connect().status == 0


@pytest.mark.parametrize("field", [256, 512])
def test_a_name_without_an_end_or_without_a_letter_is_refused(field: int) -> None:
    target, _ = make_target(HeapStorage())
    host = RawHost(target)
    data = bytearray(CONNECT_DATA_BYTES)
    data[256 : 256 + len(SUBSYSTEM)] = SUBSYSTEM.encode()
    data[512 : 512 + len(HOST)] = HOST.encode()
    data[16:18] = b"\xff\xff"
    data[field : field + 256] = b"n" * 256
    assert host.status(fabrics_entry(Connect(0, 31)), bytes(data)) == FabricsStatus.CONNECT_INVALID_PARAMETERS
    data[field : field + 256] = bytes(256)
    assert host.status(fabrics_entry(Connect(0, 31)), bytes(data)) == FabricsStatus.CONNECT_INVALID_PARAMETERS


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"host": "nqn.2026-01.io.g35:other"}, FabricsStatus.CONNECT_INVALID_HOST),
        ({"host_id": b"o" * 16}, FabricsStatus.CONNECT_INVALID_HOST),
        ({"qid": 65}, FabricsStatus.CONNECT_INVALID_PARAMETERS),
        ({"sqsize": 0}, FabricsStatus.CONNECT_INVALID_PARAMETERS),
    ],
)
def test_an_io_queue_must_fit_its_controller(change: dict[str, Any], status: int) -> None:
    target, _ = make_target(HeapStorage())
    _, cntlid = open_admin(target)
    assert RawHost(target).connect(**({"qid": 1, "cntlid": cntlid} | change)).status == status


def test_an_io_queue_of_another_subsystem_is_refused() -> None:
    from nvmeof.controller.subsystem import Subsystem

    target, _ = make_target(HeapStorage())
    target.add_subsystem(Subsystem("nqn.2026-01.io.g35:second", serial="2"))
    _, cntlid = open_admin(target)
    cqe = RawHost(target).connect(1, cntlid, subsystem="nqn.2026-01.io.g35:second")
    assert cqe.status == FabricsStatus.CONNECT_INVALID_PARAMETERS


def test_an_io_queue_needs_an_enabled_controller_and_a_free_id() -> None:
    target, _ = make_target(HeapStorage())
    admin = RawHost(target)
    cntlid = admin.connect().result
    assert RawHost(target).connect(1, cntlid).status == Status.COMMAND_SEQUENCE_ERROR
    assert admin.property_set(Property.CC, ENABLE) == 0
    first = RawHost(target)
    assert first.connect(1, cntlid).status == 0
    assert RawHost(target).connect(1, cntlid).status == Status.COMMAND_SEQUENCE_ERROR
    first.queue.connection_lost()
    assert RawHost(target).connect(1, cntlid).status == 0


def test_connect_comes_first_and_once() -> None:
    target, _ = make_target(HeapStorage())
    host = RawHost(target)
    identify = Sqe(AdminOpcode.IDENTIFY, 1, sgl=transport(4096), cdw10=1)
    assert host.status(identify) == Status.COMMAND_SEQUENCE_ERROR
    assert host.status(disconnect()) == Status.COMMAND_SEQUENCE_ERROR
    assert host.connect().status == 0
    assert host.connect().status == Status.COMMAND_SEQUENCE_ERROR


def test_connect_data_may_be_asked_for_instead_of_sent_in_the_capsule() -> None:
    from nvmeof.wire.fabrics import ConnectData
    from tests.support.nvme.raw_host import HOST_ID

    target, _ = make_target(HeapStorage())
    sqe = fabrics_entry(Connect(0, 31, cattr=4), 3, transport(1024))
    data = ConnectData(HOST_ID, 0xFFFF, SUBSYSTEM, HOST).encode()
    assert RawHost(target).status(sqe, data) == 0


def test_there_are_only_so_many_controllers() -> None:
    target, _ = make_target(HeapStorage(), settings=ControllerSettings(max_controllers=1))
    first = RawHost(target)
    assert first.connect().status == 0
    busy = RawHost(target).connect()
    assert (busy.status, busy.do_not_retry) == (FabricsStatus.CONNECT_CONTROLLER_BUSY, False)
    first.queue.connection_lost()
    assert RawHost(target).connect().status == 0


def test_controller_ids_are_not_used_again_at_once() -> None:
    target, _ = make_target(HeapStorage())
    seen = set()
    for _ in range(5):
        host = RawHost(target)
        seen.add(host.connect().result)
        host.queue.connection_lost()
    assert len(seen) == 5
    assert not target.controllers


def test_disconnect_ends_an_io_queue_and_nothing_else() -> None:
    target, _ = make_target(HeapStorage())
    admin, io = open_io(target)
    assert admin.status(disconnect()) == FabricsStatus.DISCONNECT_INVALID_QUEUE_TYPE
    assert io.status(disconnect(recfmt=1)) == FabricsStatus.CONNECT_INCOMPATIBLE_FORMAT
    assert not io.queue.ending
    assert io.status(disconnect()) == 0
    assert io.queue.finished
    assert not admin.queue.ending


def test_the_end_of_the_admin_queue_is_the_end_of_the_controller() -> None:
    target, _ = make_target(HeapStorage())
    admin, io = open_io(target)
    admin.queue.connection_lost()
    assert io.woken
    io.run()
    assert io.queue.finished
    assert not target.controllers


def test_a_connection_that_does_not_connect_is_closed() -> None:
    target, _ = make_target(HeapStorage())
    silent = RawHost(target, initialize=False)
    assert silent.queue.deadline() == 110.0
    silent.run(109.9)
    assert not silent.queue.ending
    silent.run(110.0)
    assert silent.queue.finished
