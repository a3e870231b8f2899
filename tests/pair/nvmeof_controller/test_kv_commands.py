"""Commands of the Key Value command set between our host and our controller, over TCP and over RDMA."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from emulator.jbof.faults import ErrorFault
from emulator.jbof.kv_drive import KvDrive
from emulator.jbof.kv_values import FolderValues, MemoryValues, Values
from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.storage import StorageError
from nvmeof.controller.subsystem import KvNamespace
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.host import commands, kv_commands
from nvmeof.host.bring_up import SessionConfig
from nvmeof.host.command import Command
from nvmeof.host.controller_session import Change
from nvmeof.tcp.pdu import NO_DIGESTS, R2T, C2HData, CapsuleResp, Digests, H2CData
from nvmeof.wire.cqe import Cqe
from nvmeof.wire.identify import (
    CommandSet,
    IdentifyCns,
    decode_namespace_descriptors_untrusted,
    decode_namespace_list_untrusted,
)
from nvmeof.wire.kv import (
    StoreOption,
    decode_identify_kv_namespace_untrusted,
    decode_key_list_untrusted,
    key_dwords,
)
from nvmeof.wire.log_page import LogPage
from nvmeof.wire.properties import Property
from nvmeof.wire.sqe import AdminOpcode, IoOpcode, Sqe
from nvmeof.wire.status import Status
from tests.support.nvme.entries import transport
from tests.support.nvme.heap_storage import HeapStorage
from tests.support.nvme.nvme_ends import HOST, HOST_ID, SUBSYSTEM, AdminHost, Bench, io_queue
from tests.support.nvme.raw_host import ENABLE, RawHost, make_target, open_admin
from tests.support.nvme.rdma_ends import RdmaBench

KV = 2
CAPACITY = 1 << 20
ALL_SETS = ENABLE | 6 << 4


@pytest.fixture(params=["memory", "folder"])
def drive(request: pytest.FixtureRequest, tmp_path: Path) -> KvDrive:
    values: Values = MemoryValues() if request.param == "memory" else FolderValues(tmp_path)
    return KvDrive(1, values, nguid=b"\6" * 16, capacity_bytes=CAPACITY, value_max=256 << 10, seed=5)


class TcpWorld:
    """Namespace 1 of blocks, namespace 2 of keys; one admin and one I/O queue of our host."""

    def __init__(self, drive: KvDrive, digests: Digests = NO_DIGESTS, chunk: int = 1 << 16) -> None:
        self.bench = Bench(
            chunk=chunk,
            settings=ControllerSettings(in_capsule_bytes=8192),
            tcp=TcpSettings(max_h2c_data=12288),
        )
        self.bench.target.attach(self.bench.subsystem, KvNamespace(KV, drive))
        self.admin = AdminHost(self.bench, SessionConfig(SUBSYSTEM, HOST, HOST_ID, 0.0, 4), digests)
        self.admin.start()
        assert any(event is Change.LIVE for event in self.admin.events)
        self.queue, self.host, self.link = io_queue(self.bench, self.admin, digests=digests)

    def submit(self, command: Command) -> Command:
        self.queue.submit(command, self.bench.now)
        self.bench.settle()
        return command

    def run(self, command: Command) -> Command:
        assert self.submit(command).done, command
        return command


class RdmaWorld:
    """The same over RDMA."""

    def __init__(self, drive: KvDrive) -> None:
        self.bench = RdmaBench()
        (subsystem,) = self.bench.target.subsystems
        self.bench.target.attach(subsystem, KvNamespace(KV, drive))
        self.pair = self.bench.io()

    def run(self, command: Command) -> Command:
        return self.pair.run(command)


@pytest.fixture(params=["tcp", "tcp with digests", "rdma"])
def world(request: pytest.FixtureRequest, drive: KvDrive) -> TcpWorld | RdmaWorld:
    if request.param == "rdma":
        return RdmaWorld(drive)
    both = request.param == "tcp with digests"
    return TcpWorld(drive, Digests(both, both))


def test_the_host_finds_the_namespace(drive: KvDrive) -> None:
    world = TcpWorld(drive)
    blocks, keys = (world.admin.session.namespaces[nsid] for nsid in (1, KV))
    assert (blocks.kv, blocks.lba_bytes) == (None, 4096)
    assert keys.kv == drive.format
    assert (keys.size_bytes, keys.nguid) == (CAPACITY, drive.nguid)


@pytest.mark.parametrize("size", [0, 1, 5000, 8192, 8193, 100_001, 256 << 10])
def test_store_and_retrieve(world: TcpWorld | RdmaWorld, size: int) -> None:
    value = random.Random(size).randbytes(size)
    assert world.run(kv_commands.store(KV, b"a key", [value[: size // 3], value[size // 3 :]])).status == 0
    for room in (size, size + 4097, size // 2):
        into = memoryview(bytearray(b"\xee" * room))
        command = world.run(kv_commands.retrieve(KV, b"a key", into))
        assert (command.status, command.result, command.answer_bytes) == (0, size, min(size, room))
        assert bytes(into[:size]) == value[:room]
        assert bytes(into[size:]) == b"\xee" * (room - min(size, room)), "not a byte behind the value"


def test_a_miss_is_one_command(world: TcpWorld | RdmaWorld) -> None:
    into = memoryview(bytearray(b"\xee" * 100))
    assert world.run(kv_commands.retrieve(KV, b"none", into)).status == Status.KEY_NOT_FOUND
    assert bytes(into) == b"\xee" * 100
    for command in (kv_commands.exist(KV, b"none"), kv_commands.delete(KV, b"none")):
        assert world.run(command).status == Status.KEY_NOT_FOUND


def test_exist_delete_and_conditions(world: TcpWorld | RdmaWorld) -> None:
    absent, present = StoreOption.ONLY_IF_ABSENT, StoreOption.ONLY_IF_PRESENT
    assert world.run(kv_commands.store(KV, b"k", [b"1"], options=present)).status == Status.KEY_NOT_FOUND
    assert world.run(kv_commands.store(KV, b"k", [b"1"], options=absent)).status == 0
    assert world.run(kv_commands.store(KV, b"k", [b"2"], options=absent)).status == Status.KEY_EXISTS
    assert world.run(kv_commands.store(KV, b"k", [b"3"], options=present)).status == 0
    assert world.run(kv_commands.exist(KV, b"k")).status == 0
    into = memoryview(bytearray(1))
    world.run(kv_commands.retrieve(KV, b"k", into)).check()
    assert bytes(into) == b"3"
    assert world.run(kv_commands.delete(KV, b"k")).status == 0
    assert world.run(kv_commands.exist(KV, b"k")).status == Status.KEY_NOT_FOUND
    assert world.run(commands.flush(KV)).status == 0


def test_keys_are_listed_page_by_page(world: TcpWorld | RdmaWorld) -> None:
    keys = sorted(random.Random(1).randbytes(1 + number % 16) for number in range(60))
    for key in keys:
        world.run(kv_commands.store(KV, key, [b"v"])).check()
    expected = sorted(set(keys))
    found: list[bytes] = []
    while True:
        into = memoryview(bytearray(200))
        world.run(kv_commands.list_keys(KV, found[-1] if found else b"", into)).check()
        page = [key for key in decode_key_list_untrusted(into) if not found or key > found[-1]]
        if not page:
            break
        found += page
    assert found == expected


def test_random_commands_agree_with_a_dictionary(world: TcpWorld | RdmaWorld) -> None:
    dice = random.Random(35)
    shadow: dict[bytes, bytes] = {}
    keys = [dice.randbytes(dice.randint(1, 16)) for _ in range(12)]
    for _ in range(150):
        key = dice.choice(keys)
        match dice.randrange(4):
            case 0 | 1:
                value = dice.randbytes(dice.choice([0, 1, 4096, 20_000]))
                world.run(kv_commands.store(KV, key, [value])).check()
                shadow[key] = value
            case 2:
                status = world.run(kv_commands.delete(KV, key)).status
                assert (status == 0) == (shadow.pop(key, None) is not None)
            case _:
                into = memoryview(bytearray(20_000))
                command = world.run(kv_commands.retrieve(KV, key, into))
                assert (command.status == 0) == (key in shadow)
                if key in shadow:
                    assert bytes(into[: command.result]) == shadow[key]


def test_a_full_namespace_says_so_and_stays_readable(world: TcpWorld | RdmaWorld, drive: KvDrive) -> None:
    for number in range(4):
        world.run(kv_commands.store(KV, b"%d" % number, [bytes([number]) * (256 << 10)])).check()
    full = world.run(kv_commands.store(KV, b"more", [b"x" * 10_000]))
    assert full.status == Status.CAPACITY_EXCEEDED
    small = world.run(kv_commands.store(KV, b"more", [b"x"]))
    assert small.status == Status.CAPACITY_EXCEEDED
    into = memoryview(bytearray(256 << 10))
    world.run(kv_commands.retrieve(KV, b"3", into)).check()
    assert bytes(into) == b"\3" * (256 << 10)
    world.run(kv_commands.delete(KV, b"0")).check()
    world.run(kv_commands.store(KV, b"more", [b"x"])).check()
    assert drive.used_bytes() == 3 * (256 << 10) + 4096


def test_a_connection_that_breaks_in_a_store_leaves_the_old_value_and_no_room_taken(drive: KvDrive) -> None:
    world = TcpWorld(drive, chunk=4096)
    world.run(kv_commands.store(KV, b"key", [b"old"])).check()
    command = kv_commands.store(KV, b"key", [b"n" * 100_000])
    world.queue.submit(command, world.bench.now)
    for _ in range(12):  # the capsule, the R2T, a first part of the data
        world.link.step()
    assert command.requested > 0
    assert not command.done
    with pytest.raises(StorageError):
        drive.stage(CAPACITY - 4096 - 100_000)  # its room is set aside
    world.link.cut()
    world.bench.settle()
    assert drive.used_bytes() == 4096
    again = TcpWorld(drive)
    into = memoryview(bytearray(3))
    again.run(kv_commands.retrieve(KV, b"key", into)).check()
    assert bytes(into) == b"old"
    for number in range(3):  # and all the room is there
        again.run(kv_commands.store(KV, b"%d" % number, [b"v" * (256 << 10)])).check()


@pytest.mark.parametrize("how", ["hang", "error"])
def test_a_store_that_waits_or_fails_changes_nothing(drive: KvDrive, how: str) -> None:
    world = TcpWorld(drive)
    world.run(kv_commands.store(KV, b"key", [b"old"])).check()
    if how == "hang":
        drive.set_faults(hung=True)
        command = world.submit(kv_commands.store(KV, b"key", [b"new"]))
        assert not command.done
        world.admin.session.submit(commands.abort(1, command.cid), 0.0)
        world.admin.pump()
        world.bench.settle()
        assert command.status == Status.ABORT_REQUESTED
    else:
        drive.set_faults(error=ErrorFault(Status.UNRECOVERED_ERROR))
        assert world.run(kv_commands.store(KV, b"key", [b"new"])).status == Status.UNRECOVERED_ERROR
    drive.heal()
    into = memoryview(bytearray(3))
    world.run(kv_commands.retrieve(KV, b"key", into)).check()
    assert bytes(into) == b"old"
    assert drive.used_bytes() == 4096
    for number in range(3):
        world.run(kv_commands.store(KV, b"%d" % number, [b"v" * (256 << 10)])).check()


# --- a host that knows no manners -----------------------------------------------------------------------


def raw(drive: KvDrive, *, configuration: int = ALL_SETS) -> tuple[RawHost, RawHost]:
    target, subsystem = make_target(HeapStorage())
    target.attach(subsystem, KvNamespace(KV, drive))
    admin, cntlid = open_admin(target)
    assert admin.property_set(Property.CC, 0) == 0
    assert admin.property_set(Property.CC, configuration) == 0
    io = RawHost(target)
    assert io.connect(1, cntlid).status == 0
    return admin, io


def kv(
    opcode: int, key: bytes = b"key", size: int = 0, *, length: int | None = None, options: int = 0
) -> Sqe:
    low, second, third, high = key_dwords(key)
    return Sqe(
        opcode, 4, KV, transport(size), cdw10=size, cdw2=low, cdw3=second, cdw14=third, cdw15=high,
        cdw11=(len(key) if length is None else length) | options << 8,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sqe", "status"),
    [
        (kv(0x01, size=(256 << 10) + 1), Status.INVALID_VALUE_SIZE),
        (kv(0x01, size=1, length=17), Status.INVALID_KEY_SIZE),
        (kv(0x01, size=1, length=0), Status.INVALID_KEY_SIZE),
        (kv(0x01, size=1, options=3), Status.INVALID_FIELD),
        (kv(0x01, size=1, options=8), Status.INVALID_FIELD),
        (kv(0x02, size=1, length=0), Status.INVALID_KEY_SIZE),
        (kv(0x02, size=1, options=2), Status.INVALID_FIELD),
        (kv(0x02, size=(2 << 20) + 1), Status.INVALID_FIELD),
        (kv(0x06, size=3), Status.INVALID_FIELD),
        (kv(0x06, size=8, length=200), Status.INVALID_KEY_SIZE),
        (kv(0x10, length=0), Status.INVALID_KEY_SIZE),
        (kv(0x14, length=17), Status.INVALID_KEY_SIZE),
        (kv(0x09), Status.INVALID_OPCODE),
        (kv(0x01, size=5)._replace(sgl=transport(6)), Status.DATA_SGL_LENGTH_INVALID),
    ],
)
def test_wrong_commands(drive: KvDrive, sqe: Sqe, status: int) -> None:
    _, io = raw(drive)
    assert io.status(sqe) == status
    assert drive.used_bytes() == 0


def test_a_host_that_did_not_ask_for_command_sets_sees_blocks_alone(drive: KvDrive) -> None:
    admin, io = raw(drive, configuration=ENABLE)

    def identify(cns: int, nsid: int = 0, csi: int = 0) -> bytes:
        cqe, data = admin.command(
            Sqe(AdminOpcode.IDENTIFY, 5, nsid, transport(4096), cdw10=cns, cdw11=csi << 24)
        )
        assert cqe.status == 0
        return data

    assert decode_namespace_list_untrusted(identify(IdentifyCns.ACTIVE_NAMESPACES)) == [1]
    assert identify(IdentifyCns.COMMAND_SET_NAMESPACE, KV, CommandSet.KEY_VALUE) == bytes(4096)
    assert io.status(kv(0x14)) == Status.INVALID_NAMESPACE
    assert io.status(Sqe(IoOpcode.READ, 3, 1, transport(4096))) == 0


def test_identify_and_log_page(drive: KvDrive) -> None:
    admin, io = raw(drive)

    def identify(cns: int, nsid: int = 0, csi: int = 0) -> tuple[int, bytes]:
        cqe, data = admin.command(
            Sqe(AdminOpcode.IDENTIFY, 5, nsid, transport(4096), cdw10=cns, cdw11=csi << 24)
        )
        return cqe.status, data

    assert io.status(kv(0x01, size=5000), b"v" * 5000) == 0
    namespace = decode_identify_kv_namespace_untrusted(identify(5, KV, 1)[1])
    assert (namespace.nsze, namespace.nuse, namespace.formats) == (CAPACITY, 8192, (drive.format,))
    assert namespace.nguid == drive.nguid
    assert decode_namespace_list_untrusted(identify(2)[1]) == [1, 2]
    assert decode_namespace_list_untrusted(identify(7, 0, 0)[1]) == [1]
    assert decode_namespace_list_untrusted(identify(7, 0, 1)[1]) == [2]
    assert decode_namespace_descriptors_untrusted(identify(3, KV)[1]).command_set == CommandSet.KEY_VALUE
    assert identify(8, KV)[1][14] == 1
    assert identify(0x1C)[1] == b"\3".ljust(4096, b"\0")
    assert identify(6, 0, 1) == (0, bytes(4096))
    # As of an id without a namespace: a host that goes by blocks leaves it out.
    assert identify(0, KV) == (0, bytes(4096))
    for wrong in ((5, KV, 0), (5, 1, 1)):
        assert identify(*wrong)[0] == Status.INVALID_IO_COMMAND_SET
    effects = Sqe(
        AdminOpcode.GET_LOG_PAGE, 6, 0xFFFF_FFFF, transport(4096),
        cdw10=LogPage.COMMAND_EFFECTS | 1023 << 16, cdw14=CommandSet.KEY_VALUE << 24,
    )  # fmt: skip
    cqe, page = admin.command(effects)
    assert cqe.status == 0
    supported = [number for number in range(256) if page[1024 + 4 * number] & 1]
    assert supported == [0x00, 0x01, 0x02, 0x06, 0x10, 0x14]


def test_the_command_set_profile_has_one_choice(drive: KvDrive) -> None:
    admin, _ = raw(drive)
    get = Sqe(AdminOpcode.GET_FEATURES, 5, cdw10=0x19)
    assert admin.command(get)[0] == Cqe(5, 0, 0, 0, 0)
    assert admin.status(Sqe(AdminOpcode.SET_FEATURES, 5, cdw10=0x19, cdw11=0)) == 0
    refused = Sqe(AdminOpcode.SET_FEATURES, 5, cdw10=0x19, cdw11=1)
    assert admin.status(refused) == Status.IO_COMMAND_SET_COMBINATION_REJECTED


# --- a controller that lies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("result", [0, 50, 100, 200])
def test_a_retrieve_that_does_not_bring_what_it_says_is_none(drive: KvDrive, result: int) -> None:
    """60 bytes come for a buffer of 100; only a result of 60 is an answer."""
    world = TcpWorld(drive)
    into = memoryview(bytearray(100))
    command = kv_commands.retrieve(KV, b"key", into)
    world.queue.submit(command, 0.0)
    world.queue.place(C2HData(command.cid, 0, 60, True, False))
    ended: list[Command] = []
    world.queue._apply(CapsuleResp(Cqe(command.cid, 0, result, 0, 1)), ended)
    assert ended == [command]
    assert command.status == Status.DATA_TRANSFER_ERROR


def test_the_window_of_a_store_is_the_value_itself() -> None:
    """In memory: what arrives is kept where it arrived, and sent from there."""
    drive = KvDrive(1, MemoryValues(), nguid=b"\6" * 16, capacity_bytes=CAPACITY, value_max=CAPACITY)
    _, io = raw(drive)
    io.submit(kv(0x01, size=50_000))
    ((request, _),) = io.pdus
    assert isinstance(request, R2T)
    io.pdus.clear()
    io.send_pdu(H2CData(4, request.ttag, 0, 50_000), b"v" * 50_000)
    assert io.answer()[0].status == 0
    io.queue.received(0, io.now)
    view, _ = drive.retrieve(b"key", CAPACITY, io.queue._reading)
    assert not io.queue._reading.holds(view)
    assert bytes(view) == b"v" * 50_000
