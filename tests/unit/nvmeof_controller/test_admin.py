"""Admin commands, properties, events and keep-alive of a controller."""

from __future__ import annotations

import math
import struct

import pytest

from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.subsystem import Namespace, Subsystem
from nvmeof.wire.fabrics import DISCOVERY_NQN, Authentication, PropertyAccess
from nvmeof.wire.features import (
    AEC_NAMESPACE_CHANGED,
    DISCOVERY_CHANGED_EVENT,
    NAMESPACE_CHANGED_EVENT,
    Feature,
    encode_queue_count,
)
from nvmeof.wire.identify import (
    IdentifyCns,
    decode_identify_controller_untrusted,
    decode_identify_namespace_untrusted,
    decode_namespace_descriptors_untrusted,
    decode_namespace_list_untrusted,
)
from nvmeof.wire.log_page import (
    DiscoveryEntry,
    LogPage,
    LogPageRequest,
    TransportType,
    decode_discovery_log_untrusted,
)
from nvmeof.wire.properties import (
    Capabilities,
    ControllerStatus,
    Property,
)
from nvmeof.wire.sqe import AdminOpcode, IoOpcode, Sqe
from nvmeof.wire.status import Status
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


def identify(cns: int, nsid: int = 0, csi: int = 0) -> Sqe:
    return Sqe(AdminOpcode.IDENTIFY, 1, nsid, transport(4096), cdw10=cns, cdw11=csi << 24)


def log_page(page: int, length: int, offset: int = 0, *, retain: bool = False, csi: int = 0) -> Sqe:
    dwords = LogPageRequest(page, length, offset, retain, csi=csi).dwords()
    return Sqe(AdminOpcode.GET_LOG_PAGE, 2, 0, transport(length), *dwords)


def feature(opcode: int, fid: int, value: int = 0) -> Sqe:
    return Sqe(opcode, 3, 0, transport(0), cdw10=fid, cdw11=value)


# --- properties --------------------------------------------------


def test_properties() -> None:
    target, _ = make_target(HeapStorage())
    host = RawHost(target)
    host.connect()
    capabilities = Capabilities.of_number(host.property_get(Property.CAP, 8))
    assert capabilities.max_queue_entries == 1023
    assert capabilities.command_sets == 0x41
    assert host.property_get(Property.VS) == 0x10400
    assert host.property_get(Property.CC) == 0
    assert not ControllerStatus.of_number(host.property_get(Property.CSTS)).ready
    # As Linux does it: first the configuration, then the same with the enable bit.
    assert host.property_set(Property.CC, ENABLE & ~1) == 0
    assert not ControllerStatus.of_number(host.property_get(Property.CSTS)).ready
    assert host.property_set(Property.CC, ENABLE) == 0
    assert ControllerStatus.of_number(host.property_get(Property.CSTS)).ready
    assert host.property_get(Property.CC) == ENABLE


@pytest.mark.parametrize(
    "access",
    [
        PropertyAccess(Property.CAP, 4),
        PropertyAccess(Property.CSTS, 8),
        PropertyAccess(0x30, 4),
        PropertyAccess(Property.CAP, 8, 1),
        PropertyAccess(Property.CSTS, 4, 1),
        PropertyAccess(Property.CC, 8, ENABLE),
    ],
)
def test_properties_that_are_not_there(access: PropertyAccess) -> None:
    target, _ = make_target(HeapStorage())
    host, _ = open_admin(target)
    assert host.status(fabrics_entry(access)) == Status.INVALID_FIELD


def test_properties_belong_to_the_admin_queue() -> None:
    target, _ = make_target(HeapStorage())
    _, io = open_io(target)
    assert io.status(fabrics_entry(PropertyAccess(Property.VS, 4))) == Status.INVALID_OPCODE
    assert io.status(fabrics_entry(PropertyAccess(Property.CC, 4, 0))) == Status.INVALID_OPCODE
    assert io.status(fabrics_entry(Authentication(receive=True, length=0))) == Status.INVALID_OPCODE


@pytest.mark.parametrize(
    "value", [0x0040_0001, 0x0006_0001, ENABLE | 1 << 7, ENABLE | 1 << 11, ENABLE | 7 << 4]
)
def test_a_configuration_that_cannot_be_is_a_fatal_status(value: int) -> None:
    target, _ = make_target(HeapStorage())
    host = RawHost(target)
    host.connect()
    assert host.property_set(Property.CC, value) == 0
    status = ControllerStatus.of_number(host.property_get(Property.CSTS))
    assert status.fatal
    assert not status.ready
    assert host.status(identify(1)) == Status.COMMAND_SEQUENCE_ERROR
    # Disabling clears it.
    host.property_set(Property.CC, 0)
    host.property_set(Property.CC, ENABLE)
    assert ControllerStatus.of_number(host.property_get(Property.CSTS)).ready


def test_shutdown_is_complete_at_once_and_ends_io() -> None:
    target, _ = make_target(HeapStorage())
    admin, io = open_io(target)
    assert admin.property_set(Property.CC, ENABLE | 1 << 14) == 0
    assert ControllerStatus.of_number(admin.property_get(Property.CSTS)).shutdown == 2
    assert io.status(Sqe(IoOpcode.FLUSH, 1, 1, transport(0))) == Status.COMMAND_SEQUENCE_ERROR


def test_a_reset_closes_the_io_queues() -> None:
    target, _ = make_target(HeapStorage())
    admin, io = open_io(target)
    assert admin.property_set(Property.CC, 0) == 0
    assert io.woken
    io.run()
    assert io.queue.finished
    assert admin.property_set(Property.CC, ENABLE) == 0
    cntlid = target.controllers[0].cntlid
    assert RawHost(target).connect(1, cntlid).status == 0


def test_admin_commands_need_an_enabled_controller() -> None:
    target, _ = make_target(HeapStorage())
    host = RawHost(target)
    host.connect()
    assert host.status(identify(1)) == Status.COMMAND_SEQUENCE_ERROR


# --- Identify ----------------------------------------------------


def test_identify_controller_has_what_linux_insists_on() -> None:
    target, _ = make_target(HeapStorage(), settings=ControllerSettings(in_capsule_bytes=32 << 10))
    host, cntlid = open_admin(target)
    cqe, data = host.command(identify(IdentifyCns.CONTROLLER))
    answer = decode_identify_controller_untrusted(data)
    assert cqe.status == 0
    assert answer.cntlid == cntlid
    assert answer.kas > 0
    assert answer.ioccsz == (64 + (32 << 10)) // 16
    assert answer.iorcsz == 1
    assert answer.icdoff == 0
    assert answer.maxcmd == 1024
    assert answer.mdts == 9
    assert answer.sgls & 1
    assert answer.sgls & 1 << 20
    assert (answer.sqes, answer.cqes) == (0x66, 0x44)
    assert answer.subnqn == SUBSYSTEM
    assert answer.nn == 1024
    assert answer.cntrltype == 1


def test_identify_namespaces() -> None:
    target, subsystem = make_target(HeapStorage(64), HeapStorage(128, lba_bytes=512, nguid=0xABC))
    target.attach(subsystem, Namespace(900, HeapStorage(1)))
    host, _ = open_admin(target)
    first = decode_identify_namespace_untrusted(host.command(identify(0, 1))[1])
    assert (first.nsze, first.ncap, first.lba_bytes) == (64, 64, 4096)
    second = decode_identify_namespace_untrusted(host.command(identify(0, 2))[1])
    assert (second.nsze, second.lba_bytes, second.nguid) == (128, 512, (0xABC).to_bytes(16, "big"))
    assert decode_namespace_list_untrusted(host.command(identify(2))[1]) == [1, 2, 900]
    assert decode_namespace_list_untrusted(host.command(identify(2, 2))[1]) == [900]
    assert decode_namespace_list_untrusted(host.command(identify(7, 1))[1]) == [2, 900]
    names = decode_namespace_descriptors_untrusted(host.command(identify(3, 2))[1])
    assert (names.nguid, names.command_set) == ((0xABC).to_bytes(16, "big"), 0)
    assert host.command(identify(5, 1))[1] == bytes(4096)
    assert host.command(identify(6))[1][3] == 255
    assert host.command(identify(8, 1))[1][14] == 1
    assert host.command(identify(0x1C))[1] == b"\3".ljust(4096, b"\0")
    assert host.command(identify(0, 500))[1] == bytes(4096)


@pytest.mark.parametrize(
    ("sqe", "status"),
    [
        (identify(0, 0), Status.INVALID_NAMESPACE),
        (identify(0, 1025), Status.INVALID_NAMESPACE),
        (identify(0, 0xFFFFFFFF), Status.INVALID_NAMESPACE),
        (identify(2, 0xFFFFFFFE), Status.INVALID_NAMESPACE),
        (identify(3, 2), Status.INVALID_NAMESPACE),
        (identify(0x13), Status.INVALID_FIELD),
        (identify(6, 0, csi=2), Status.INVALID_FIELD),
        (identify(7, 0, csi=2), Status.INVALID_FIELD),
        (Sqe(AdminOpcode.IDENTIFY, 1, 0, transport(512), cdw10=1), Status.DATA_SGL_LENGTH_INVALID),
        (Sqe(0x01, 1), Status.INVALID_OPCODE),
        (Sqe(0x04, 1), Status.INVALID_OPCODE),
        (Sqe(0x80, 1), Status.INVALID_OPCODE),
        (Sqe(AdminOpcode.KEEP_ALIVE, 1, flags=0x41), Status.INVALID_FIELD),
        (Sqe(AdminOpcode.KEEP_ALIVE, 1, flags=0), Status.INVALID_FIELD),
    ],
)
def test_wrong_admin_commands(sqe: Sqe, status: int) -> None:
    target, _ = make_target(HeapStorage())
    host, _ = open_admin(target)
    assert host.status(sqe) == status
    assert host.status(identify(1)) == 0


# --- features ----------------------------------------------------


def test_features() -> None:
    target, _ = make_target(HeapStorage(), settings=ControllerSettings(max_io_queues=8))
    host, _ = open_admin(target)

    def put(fid: int, value: int) -> tuple[int, int]:
        cqe = host.command(feature(AdminOpcode.SET_FEATURES, fid, value))[0]
        return cqe.status, cqe.result

    def get(fid: int, value: int = 0) -> tuple[int, int]:
        cqe = host.command(feature(AdminOpcode.GET_FEATURES, fid, value))[0]
        return cqe.status, cqe.result

    assert put(Feature.QUEUE_COUNT, encode_queue_count(4, 6)) == (0, encode_queue_count(4, 4))
    assert put(Feature.QUEUE_COUNT, encode_queue_count(99, 99)) == (0, encode_queue_count(8, 8))
    assert put(Feature.QUEUE_COUNT, 0xFFFF_FFFF)[0] == Status.INVALID_FIELD
    assert get(Feature.QUEUE_COUNT) == (0, encode_queue_count(8, 8))
    assert put(Feature.KEEP_ALIVE_TIMER, 1500) == (0, 0)
    assert get(Feature.KEEP_ALIVE_TIMER) == (0, 2000)
    assert put(Feature.ASYNC_EVENT_CONFIG, AEC_NAMESPACE_CHANGED) == (0, 0)
    assert get(Feature.ASYNC_EVENT_CONFIG) == (0, AEC_NAMESPACE_CHANGED)
    assert put(Feature.TEMPERATURE_THRESHOLD, 333)[0] == 0
    assert get(Feature.TEMPERATURE_THRESHOLD) == (0, 333)
    assert get(Feature.VOLATILE_WRITE_CACHE) == (0, 1)
    assert put(Feature.VOLATILE_WRITE_CACHE, 0)[0] == Status.FEATURE_NOT_CHANGEABLE
    assert put(Feature.POWER_MANAGEMENT, 1)[0] == Status.INVALID_FIELD
    assert put(Feature.HOST_ID, 0)[0] == Status.COMMAND_SEQUENCE_ERROR
    assert put(0xEE, 0)[0] == Status.INVALID_FIELD
    assert get(0xEE)[0] == Status.INVALID_FIELD
    assert get(Feature.ASYNC_EVENT_CONFIG | 1 << 8)[0] == Status.INVALID_FIELD
    assert put(Feature.ASYNC_EVENT_CONFIG | 1 << 31, 0)[0] == Status.FEATURE_NOT_SAVEABLE


def test_the_host_id_can_be_read_back() -> None:
    from tests.support.nvme.raw_host import HOST_ID

    target, _ = make_target(HeapStorage())
    host, _ = open_admin(target)
    sqe = Sqe(AdminOpcode.GET_FEATURES, 3, 0, transport(16), cdw10=Feature.HOST_ID, cdw11=1)
    assert host.command(sqe)[1] == HOST_ID
    short = Sqe(AdminOpcode.GET_FEATURES, 3, 0, transport(16), cdw10=Feature.HOST_ID)
    assert host.status(short) == Status.INVALID_FIELD


# --- log pages ---------------------------------------------------


def test_log_pages() -> None:
    target, _ = make_target(HeapStorage())
    host, _ = open_admin(target)
    assert host.command(log_page(LogPage.SMART, 512))[1][1:3] == (298).to_bytes(2, "little")
    effects = struct.unpack("<1024I", host.command(log_page(LogPage.COMMAND_EFFECTS, 4096))[1])
    assert effects[256 + IoOpcode.WRITE]
    assert effects[AdminOpcode.KEEP_ALIVE]
    assert not effects[256 + 4], "Write Uncorrectable"
    assert host.command(log_page(LogPage.FIRMWARE_SLOT, 512))[1][8:11] == b"0.1"
    supported = host.command(log_page(LogPage.SUPPORTED, 1024))[1]
    assert [page for page in range(256) if supported[page * 4]] == [0, 1, 2, 3, 4, 5]
    # A page is read in parts, and reads as zeros after its end.
    whole = host.command(log_page(LogPage.COMMAND_EFFECTS, 4096))[1]
    assert host.command(log_page(LogPage.COMMAND_EFFECTS, 512, 1024))[1] == whole[1024:1536]
    assert host.command(log_page(LogPage.SMART, 1024, 256))[1][256:] == bytes(768)


@pytest.mark.parametrize(
    ("sqe", "status"),
    [
        (log_page(LogPage.ANA, 512), Status.INVALID_LOG_PAGE),
        (log_page(LogPage.DISCOVERY, 1024), Status.INVALID_LOG_PAGE),
        (log_page(LogPage.SMART, 512, 2), Status.INVALID_FIELD),
        (log_page(LogPage.SMART, 512, 516), Status.INVALID_FIELD),
        (log_page(LogPage.SMART, 4 << 20), Status.INVALID_FIELD),
        (log_page(LogPage.COMMAND_EFFECTS, 4096, csi=2), Status.INVALID_FIELD),
    ],
)
def test_wrong_log_pages(sqe: Sqe, status: int) -> None:
    target, _ = make_target(HeapStorage())
    host, _ = open_admin(target)
    assert host.status(sqe) == status


def test_errors_are_logged() -> None:
    target, _ = make_target(HeapStorage())
    admin, io = open_io(target)
    assert io.status(Sqe(IoOpcode.READ, 77, 1, transport(4096), cdw10=1000)) == Status.LBA_OUT_OF_RANGE
    raw = admin.command(log_page(LogPage.ERROR, 64))[1]
    expected = (1, 1, 77, 0x80 << 1, 0xFFFF, 1000, 1, TransportType.TCP)
    assert struct.unpack("<QHHHHQIxB34x", raw) == expected


# --- events ------------------------------------------------------


def await_event(host: RawHost, cid: int) -> None:
    host.submit(Sqe(AdminOpcode.ASYNC_EVENT_REQUEST, cid, 0, transport(0)))


def changed_ids(page: bytes) -> list[int]:
    return [nsid for (nsid,) in struct.iter_unpack("<I", page) if nsid]


def test_a_namespace_change_is_told_once_until_the_log_is_read() -> None:
    target, subsystem = make_target(HeapStorage())
    host, _ = open_admin(target)
    await_event(host, 40)
    assert not host.pdus
    target.attach(subsystem, Namespace(5, HeapStorage()))
    assert host.woken
    host.run()
    cqe, _ = host.answer()
    assert (cqe.cid, cqe.result) == (40, NAMESPACE_CHANGED_EVENT.to_number())
    await_event(host, 41)
    target.remove_namespace(subsystem, 5)
    target.remove_namespace(subsystem, 1)
    host.run()
    assert not host.pdus, "the log has not been read, so there is nothing new to tell"
    changed = host.command(log_page(LogPage.CHANGED_NAMESPACES, 4096, retain=True))[1]
    assert changed_ids(changed) == [1, 5]
    changed = host.command(log_page(LogPage.CHANGED_NAMESPACES, 4096))[1]
    assert changed_ids(changed) == [1, 5]
    changed = host.command(log_page(LogPage.CHANGED_NAMESPACES, 4096))[1]
    assert changed_ids(changed) == []
    target.attach(subsystem, Namespace(1, HeapStorage()))
    host.run()
    assert host.answer()[0].cid == 41


def test_an_event_waits_for_a_request() -> None:
    target, subsystem = make_target(HeapStorage())
    host, _ = open_admin(target)
    target.attach(subsystem, Namespace(2, HeapStorage()))
    host.run()
    assert not host.pdus
    await_event(host, 50)
    host.run()
    assert host.answer()[0].cid == 50


def test_events_that_the_host_does_not_want_are_not_told() -> None:
    target, subsystem = make_target(HeapStorage())
    host, _ = open_admin(target)
    assert host.status(feature(AdminOpcode.SET_FEATURES, Feature.ASYNC_EVENT_CONFIG, 0)) == 0
    await_event(host, 50)
    target.attach(subsystem, Namespace(2, HeapStorage()))
    host.run()
    assert not host.pdus


def test_a_host_may_wait_for_so_many_events_and_take_the_wish_back() -> None:
    target, _ = make_target(HeapStorage(), settings=ControllerSettings(async_event_limit=2))
    host, _ = open_admin(target)
    await_event(host, 1)
    await_event(host, 2)
    assert host.status(Sqe(AdminOpcode.ASYNC_EVENT_REQUEST, 3, 0, transport(0))) == Status.AER_LIMIT_EXCEEDED
    host.submit(Sqe(AdminOpcode.ABORT, 4, 0, transport(0), cdw10=0 | 2 << 16))
    host.run()
    ended = {pdu.cqe.cid: pdu.cqe for pdu, _ in host.pdus}  # type: ignore[union-attr]
    assert ended[2].status == Status.ABORT_REQUESTED
    assert (ended[4].status, ended[4].result) == (0, 0)
    host.pdus.clear()
    assert host.command(Sqe(AdminOpcode.ABORT, 5, 0, transport(0), cdw10=0 | 2 << 16))[0].result == 1
    await_event(host, 6)
    assert not host.pdus


def test_more_changes_than_the_log_can_list() -> None:
    target, subsystem = make_target()
    host, _ = open_admin(target)
    controller = target.controllers[0]
    for nsid in range(1, 1100):
        controller.namespace_changed(nsid)
    changed = host.command(log_page(LogPage.CHANGED_NAMESPACES, 4096))[1]
    assert changed_ids(changed) == [0xFFFF_FFFF]
    assert subsystem.namespaces == {}


# --- keep-alive --------------------------------------------------


def test_a_silent_host_loses_its_controller() -> None:
    target, _ = make_target(HeapStorage())
    admin = RawHost(target)
    cntlid = admin.connect(kato=1500).result
    assert admin.property_set(Property.CC, ENABLE) == 0
    io = RawHost(target)
    assert io.connect(1, cntlid).status == 0
    assert admin.queue.deadline() == 102.0
    admin.now = 101.0
    assert admin.status(Sqe(AdminOpcode.KEEP_ALIVE, 1, 0, transport(0))) == 0
    io.now = 102.5
    assert io.status(Sqe(IoOpcode.FLUSH, 1, 1, transport(0))) == 0
    assert admin.queue.deadline() == 104.5, "a command on any queue shows that the host is alive"
    admin.run(104.4)
    assert not admin.queue.ending
    admin.run(104.5)
    assert admin.queue.finished
    io.run(104.5)
    assert io.queue.finished
    assert "keep-alive" in (io.queue.end_reason or "")


def test_what_comes_after_the_keep_alive_time_is_not_carried_out() -> None:
    # As after a process was stopped: the I/O queue is looked at first, and its host may have changed paths.
    target, _ = make_target(HeapStorage())
    admin = RawHost(target)
    cntlid = admin.connect(kato=1500).result
    assert admin.property_set(Property.CC, ENABLE) == 0
    io = RawHost(target)
    assert io.connect(1, cntlid).status == 0
    io.now = 102.0
    refused = io.command(Sqe(IoOpcode.FLUSH, 1, 1, transport(0)))[0]
    assert refused.status == Status.KEEP_ALIVE_EXPIRED
    assert not refused.do_not_retry, "by another connection it is served"
    io.run(102.0)
    assert io.queue.finished, "this connection serves nothing more"
    admin.run(102.0)
    assert admin.queue.finished


def test_without_keep_alive_a_host_may_be_silent_for_ever() -> None:
    target, _ = make_target(HeapStorage())
    host, _ = open_admin(target)
    assert host.queue.deadline() == math.inf


# --- discovery ---------------------------------------------------


def test_discovery_shows_a_host_what_it_may_use() -> None:
    target, _ = make_target(HeapStorage())
    target.add_subsystem(Subsystem("nqn.2026-01.io.g35:private", serial="p", allowed_hosts=["nqn.friend"]))
    target.add_port(DiscoveryEntry("127.0.0.1", "4420"))
    host, _ = open_admin(target, subsystem=DISCOVERY_NQN)
    log = decode_discovery_log_untrusted(host.command(log_page(LogPage.DISCOVERY, 2048))[1])
    (entry,) = log.entries
    assert (entry.subsystem_nqn, entry.address, entry.service) == (SUBSYSTEM, "127.0.0.1", "4420")
    friend, _ = open_admin(target, subsystem=DISCOVERY_NQN, host="nqn.friend")
    log = decode_discovery_log_untrusted(friend.command(log_page(LogPage.DISCOVERY, 4096))[1])
    assert len(log.entries) == 2
    answer = decode_identify_controller_untrusted(host.command(identify(1))[1])
    assert (answer.cntrltype, answer.nn) == (2, 0)
    assert host.status(identify(2)) == Status.INVALID_FIELD
    assert host.status(feature(AdminOpcode.SET_FEATURES, Feature.QUEUE_COUNT)) == Status.INVALID_FIELD
    assert host.queue.deadline() < math.inf, "a discovery controller does not stay for ever"
    generation = log.generation
    await_event(host, 9)
    target.add_subsystem(Subsystem("nqn.2026-01.io.g35:late", serial="l"))
    host.run()
    assert host.answer()[0].result == DISCOVERY_CHANGED_EVENT.to_number()
    log = decode_discovery_log_untrusted(host.command(log_page(LogPage.DISCOVERY, 4096))[1])
    assert log.generation > generation


def test_removing_a_subsystem_ends_its_controllers() -> None:
    target, _ = make_target(HeapStorage())
    host, _ = open_admin(target)
    target.remove_subsystem(SUBSYSTEM)
    host.run()
    assert host.queue.finished
    assert RawHost(target).connect(host=HOST).status != 0
