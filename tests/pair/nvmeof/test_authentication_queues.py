"""Authentication on whole queues, over TCP and RDMA in memory: what is served before it, and after."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nvmeof.authentication.secret import Credentials, DhchapSecret, new_secret
from nvmeof.controller.settings import ControllerSettings
from nvmeof.errors import AuthenticationFailed, ConnectionLost, NvmeofError
from nvmeof.host import commands
from nvmeof.host.bring_up import SessionConfig, authenticate, connect_command, join
from nvmeof.host.command import Command
from nvmeof.host.controller_session import Ended, SessionState
from nvmeof.host.procedure import each_command
from nvmeof.host.tcp_queue import TcpQueue
from nvmeof.limits import AUTHENTICATION_S, CONNECT_TIMEOUT_S
from nvmeof.transport.reconnect import History, ReconnectPolicy, next_try
from nvmeof.wire.authentication import CHALLENGE, MAX_MESSAGE_BYTES, GroupId, HashId, Negotiate, Protocol
from nvmeof.wire.fabrics import DISCOVERY_NQN, RESULT_AUTH_REQUIRED
from nvmeof.wire.identify import IdentifyCns
from nvmeof.wire.properties import Property
from nvmeof.wire.status import FabricsStatus, Status
from tests.support.nvme import more_commands
from tests.support.nvme.nvme_ends import HOST, HOST_ID, LBA, SUBSYSTEM, AdminHost, Bench, io_queue
from tests.support.nvme.rdma_ends import RdmaBench, RdmaPair

SECRET, OWN = new_secret(), new_secret()
THEIRS = Credentials(SECRET, OWN, (HashId.SHA256,), (GroupId.NULL,))
WRONG = pytest.mark.expects_log("authentication failed")


def config(credentials: Credentials | None, nqn: str = SUBSYSTEM) -> SessionConfig:
    return SessionConfig(nqn, HOST, HOST_ID, 0, io_queues=4, credentials=credentials)


def bench(settings: ControllerSettings | None = None, theirs: Credentials | None = THEIRS) -> Bench:
    made = Bench(settings=settings)
    made.target.set_credentials(made.subsystem, HOST, theirs)
    return made


def started(place: Bench, credentials: Credentials | None, nqn: str = SUBSYSTEM) -> AdminHost:
    admin = AdminHost(place, config(credentials, nqn))
    admin.start()
    return admin


def why(admin: AdminHost) -> NvmeofError:
    """What ended a session."""
    ends = [event for event in admin.events if isinstance(event, Ended)]
    assert len(ends) == 1
    assert ends[0].error is not None
    return ends[0].error


def raw_queue(place: Bench, qid: int = 0, cntlid: int = 0xFFFF) -> tuple[TcpQueue, Command]:
    """A queue that has said Connect and nothing else."""
    queue = TcpQueue(31, in_capsule_bytes=8192)
    place.connect(queue)
    command = connect_command(config(None), qid, 32, cntlid)
    run(place, queue, command)
    return queue, command


def run(place: Bench, queue: TcpQueue, command: Command) -> Command:
    queue.submit(command, place.now)
    place.settle()
    assert command.done, command
    return command


def prove(credentials: Credentials, issue: Callable[[Command], object]) -> None:
    """Authenticate a queue that has said Connect; `issue` runs a command of it to its end."""
    for command in each_command(authenticate(credentials, HOST, SUBSYSTEM)):
        issue(command)


# --- it fits --------------------------------------------------------------------------------------------


PADDED = pytest.mark.parametrize("padded", [False, True], ids=["as long as the message", "padded"])
"""How long a controller's messages are: SPDK's target sends what there is, Linux's what was allocated."""


@PADDED
@pytest.mark.parametrize("own", [OWN, None], ids=["both-ways", "one-way"])
def test_admin_and_io_queues_are_proven(own: DhchapSecret | None, padded: bool) -> None:
    place = bench(ControllerSettings(pads_authentication=padded))
    admin = started(place, Credentials(SECRET, own))
    assert admin.session.state is SessionState.LIVE
    queue, _, _ = io_queue(place, admin)
    content, into = bytes(range(256)) * 16, bytearray(LBA)
    run(place, queue, commands.write(1, 0, 1, [content])).check()
    run(place, queue, commands.read(1, 0, 1, memoryview(into))).check()
    assert into == content
    assert place.target.authentications.succeeded == 2
    assert not place.target.unproven


@PADDED
def test_over_rdma(padded: bool) -> None:
    place = RdmaBench(controller=ControllerSettings(max_transfer_bytes=1 << 20, pads_authentication=padded))
    place.target.set_credentials(place.target.subsystems[0], HOST, THEIRS)
    for qid, cntlid in ((0, 0xFFFF), (1, 1)):
        queue = RdmaPair(place, qid, 16)
        joining = join(config(Credentials(SECRET, OWN)), qid, 17, cntlid)
        for command in each_command(joining):
            queue.run(command)
        if qid == 0:
            queue.run(commands.property_set(Property.CC, 0x460001)).check()
    queue.run(commands.write(1, 0, 1, [bytes(LBA)])).check()
    assert place.target.authentications.succeeded == 2


def test_over_rdma_a_short_message_has_zeros_behind_it() -> None:
    place = RdmaBench()
    subsystem = place.target.subsystems[0]
    place.target.set_credentials(subsystem, HOST, THEIRS)
    queue = RdmaPair(place, 0, 16)
    queue.run(connect_command(config(None), 0, 17, 0xFFFF)).check()
    left_over = queue.buffers.borrow(MAX_MESSAGE_BYTES)
    left_over.view[:] = bytes([255]) * MAX_MESSAGE_BYTES
    queue.buffers.give_back(left_over)
    queue.run(commands.authentication_send(Negotiate(1, (Protocol((1,), (0,)),)).encode())).check()
    challenge = queue.run(commands.authentication_receive())
    challenge.check()
    assert challenge.data_in is not None
    assert not any(challenge.data_in[CHALLENGE.size + 32 :])


@pytest.mark.parametrize("padded", [False, True])
def test_a_message_is_as_long_as_the_enclosure_is_told(padded: bool) -> None:
    place = bench(ControllerSettings(pads_authentication=padded))
    queue, _ = raw_queue(place)
    message = Negotiate(1, (Protocol((1,), (0,)),)).encode()
    run(place, queue, commands.authentication_send(message)).check()
    challenge = run(place, queue, commands.authentication_receive())
    challenge.check()
    assert challenge.in_bytes == MAX_MESSAGE_BYTES
    assert challenge.received == (MAX_MESSAGE_BYTES if padded else CHALLENGE.size + 32)


def test_a_host_without_a_secret_there_is_not_asked() -> None:
    place = bench(theirs=None)
    assert started(place, Credentials(SECRET)).session.state is SessionState.LIVE
    queue, connect = raw_queue(place)
    assert not connect.result & RESULT_AUTH_REQUIRED
    message = Negotiate(1, (Protocol((1,), (0,)),)).encode()
    assert run(place, queue, commands.authentication_send(message)).status == Status.INVALID_OPCODE
    assert run(place, queue, commands.authentication_receive()).status == Status.INVALID_OPCODE


def test_discovery_wants_no_authentication() -> None:
    assert started(bench(), Credentials(SECRET, OWN), DISCOVERY_NQN).session.state is SessionState.LIVE


# --- it does not ----------------------------------------------------------------------------------------


@WRONG
@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (None, "no secret for it"),
        (Credentials(new_secret(), OWN), "does not accept the secret"),
        (Credentials(SECRET, new_secret()), "could not prove itself"),
        (Credentials(SECRET, OWN, (HashId.SHA512,)), "hash unusable"),
    ],
)
def test_wrong_credentials_end_the_session_and_say_whose_fault_it_is(
    ours: Credentials | None, said: str
) -> None:
    place = bench()
    admin = started(place, ours)
    error = why(admin)
    assert isinstance(error, AuthenticationFailed)
    assert said in str(error)
    assert SECRET.text()[10:20] not in str(error)
    place.settle()
    if ours is not None:
        assert place.target.authentications.failed == 1
        assert HOST in place.target.authentications.last_failure
    assert not place.target.unproven
    # No storm: never connected and refused for good, a keeper gives it up at once; an agent waits longer.
    assert next_try(ReconnectPolicy(), History(0.0, 1, False, error), 0.1) is None
    assert next_try(ReconnectPolicy(), History(0.0, 8, True, error), 0.1) == ReconnectPolicy().most_s


@pytest.mark.parametrize("credentials", [Credentials(SECRET, OWN), None], ids=["proving", "without"])
def test_a_connection_that_is_lost_says_so_where_it_was_amid_the_authentication(
    credentials: Credentials | None,
) -> None:
    place = bench(theirs=THEIRS if credentials else None)
    admin = AdminHost(place, config(credentials))
    admin.session.start(place.now)
    for issued in range(1, 4):
        (command,) = admin.session.take_commands()
        if issued == 3:
            break
        run(place, admin.queue, command)
        admin.session.ended(command, place.now)
    admin.session.connection_lost(ConnectionLost("the far end closed it"))
    admin.events += admin.session.take_events()
    assert isinstance(why(admin), ConnectionLost)
    assert str(why(admin)).startswith("the far end closed it")
    assert ("compare the secrets" in str(why(admin))) is (credentials is not None)
    assert admin.session.state is SessionState.ENDED


@pytest.mark.parametrize("hangs_up", [True, False], ids=["it-hangs-up", "it-says-nothing"])
def test_our_verdict_stands_where_the_farewell_is_not_answered(hangs_up: bool) -> None:
    place = bench()
    admin = AdminHost(place, config(Credentials(SECRET, new_secret())))
    admin.session.start(place.now)
    for _ in ("connect", "negotiate", "challenge", "reply", "verdict"):
        (command,) = admin.session.take_commands()
        run(place, admin.queue, command)
        admin.session.ended(command, place.now)
    (farewell,) = admin.session.take_commands()
    assert farewell.name == "authentication send"
    if hangs_up:
        admin.session.connection_lost(ConnectionLost("the far end closed it"))
    else:
        admin.session.tick(place.now + CONNECT_TIMEOUT_S)
    admin.events += admin.session.take_events()
    error = why(admin)
    assert isinstance(error, AuthenticationFailed)
    assert "could not prove itself" in str(error)


def test_a_controller_that_skips_authentication_is_refused_by_who_wants_both_ways() -> None:
    place = bench(theirs=None)
    assert "does not authenticate" in str(why(started(place, Credentials(SECRET, OWN))))


BEFORE: list[Callable[[], Command]] = [
    lambda: commands.property_get(Property.CAP),
    lambda: commands.property_set(Property.CC, 0x460001),
    lambda: commands.identify(IdentifyCns.CONTROLLER),
    commands.keep_alive,
    commands.async_event_request,
    more_commands.disconnect,
    lambda: commands.get_log_page(2, 512),
    lambda: connect_command(config(None), 0, 32, 0xFFFF),
]


@pytest.mark.parametrize("make", BEFORE)
def test_nothing_is_served_before(make: Callable[[], Command]) -> None:
    place = bench()
    queue, connect = raw_queue(place)
    assert connect.result & RESULT_AUTH_REQUIRED
    assert run(place, queue, make()).status == FabricsStatus.AUTHENTICATION_REQUIRED


def test_an_io_queue_proves_itself_too() -> None:
    place = bench()
    admin = started(place, Credentials(SECRET))
    assert admin.session.facts is not None
    queue, connect = raw_queue(place, 1, admin.session.facts.cntlid)
    assert connect.result & RESULT_AUTH_REQUIRED
    place.storage[1].memory[:LBA] = b"\x5a" * LBA
    into = bytearray(LBA)
    read = run(place, queue, commands.read(1, 0, 1, memoryview(into)))
    assert (read.status, bytes(into)) == (FabricsStatus.AUTHENTICATION_REQUIRED, bytes(LBA))
    write = run(place, queue, commands.write(1, 0, 1, [bytes(LBA)]))
    assert write.status == FabricsStatus.AUTHENTICATION_REQUIRED
    assert place.storage[1].memory[:LBA] == b"\x5a" * LBA
    prove(Credentials(SECRET), lambda command: run(place, queue, command))
    run(place, queue, commands.read(1, 0, 1, memoryview(into))).check()
    assert into == b"\x5a" * LBA


def test_a_queue_id_is_had_by_the_first_that_proves_itself() -> None:
    place = bench()
    admin = started(place, Credentials(SECRET))
    assert admin.session.facts is not None
    strangers = [raw_queue(place, 1, admin.session.facts.cntlid)[0] for _ in range(2)]
    queue, connect = raw_queue(place, 1, admin.session.facts.cntlid)
    connect.check()
    prove(Credentials(SECRET), lambda command: run(place, queue, command))
    late, _ = strangers
    prove(Credentials(SECRET), lambda command: run(place, late, command))
    place.settle()
    assert (queue.ready, late.ready) == (True, False)
    run(place, queue, commands.read(1, 0, 1, memoryview(bytearray(LBA)))).check()
    _, connect = raw_queue(place, 1, admin.session.facts.cntlid)
    assert connect.status == Status.COMMAND_SEQUENCE_ERROR


def test_a_controller_that_has_ended_takes_no_queue_that_proves_itself_then() -> None:
    place = bench()
    admin = started(place, Credentials(SECRET))
    assert admin.session.facts is not None
    queue, _ = raw_queue(place, 1, admin.session.facts.cntlid)
    (controller,) = place.target.controllers
    controller.end("a test wants it")
    prove(Credentials(SECRET), lambda command: run(place, queue, command))
    place.settle()
    assert not queue.ready


def test_a_stranger_keeps_no_controller_alive() -> None:
    place = bench()
    queue = TcpQueue(31, in_capsule_bytes=8192)
    place.connect(queue)
    run(place, queue, connect_command(SessionConfig(SUBSYSTEM, HOST, HOST_ID, 5.0), 0, 32, 0xFFFF)).check()
    prove(Credentials(SECRET), lambda command: run(place, queue, command))
    run(place, queue, commands.property_set(Property.CC, 0x460001)).check()
    (controller,) = place.target.controllers
    until = controller.expires_at
    place.settle(place.now + 1.0)
    stranger, _ = raw_queue(place, 1, controller.cntlid)
    run(place, stranger, commands.read(1, 0, 1, memoryview(bytearray(LBA))))
    assert controller.expires_at == until
    run(place, queue, commands.keep_alive()).check()
    assert controller.expires_at > until


@WRONG
def test_an_io_queue_with_a_wrong_secret_leaves_the_others_alone() -> None:
    place = bench()
    admin = started(place, Credentials(SECRET))
    assert admin.session.facts is not None
    queue, _ = raw_queue(place, 1, admin.session.facts.cntlid)
    with pytest.raises(AuthenticationFailed):
        prove(Credentials(new_secret()), lambda command: run(place, queue, command))
    place.settle()
    assert sorted(place.target.controllers[0].queues) == [0]
    admin.run(commands.identify(IdentifyCns.CONTROLLER)).check()


def test_odd_authentication_commands_are_refused() -> None:
    place = bench()
    queue, _ = raw_queue(place)
    for change in (
        {"cdw11": 0},
        {"cdw11": 7},
        {"cdw11": 4097},
        {"cdw10": 0xEA01_0100},
        {"cdw10": 0xE901_0200},
        {"cdw10": 0xE902_0100},
    ):
        command = commands.authentication_receive()
        for name, value in change.items():
            setattr(command, name, value)
        assert run(place, queue, command).status in (
            Status.INVALID_FIELD,
            Status.DATA_SGL_LENGTH_INVALID,
        ), change


# --- time, bounds, secrets that change ------------------------------------------------------------------


@WRONG
@pytest.mark.parametrize("qid", [0, 1])
def test_a_queue_that_does_not_prove_itself_in_time_ends(qid: int) -> None:
    place = bench()
    admin = started(place, Credentials(SECRET))
    assert admin.session.facts is not None
    queue, _ = raw_queue(place, qid, admin.session.facts.cntlid if qid else 0xFFFF)
    session = next(end.queue.session for _, end, _ in place._wires if end.queue.session.unproven)
    assert session.deadline() == AUTHENTICATION_S
    place.settle(AUTHENTICATION_S - 0.1)
    assert queue.ready
    place.settle(AUTHENTICATION_S + 0.1)
    assert session.close_reason == "no authentication within the time for it"
    assert not place.target.unproven
    assert place.target.authentications.failed == 1


def test_a_host_may_compute_for_longer_than_its_keep_alive_time() -> None:
    """Linux computes for seconds with a large group on a slow machine, and sends no Keep Alive meanwhile."""
    place = bench()
    queue = TcpQueue(31, in_capsule_bytes=8192)
    place.connect(queue)
    asking = SessionConfig(SUBSYSTEM, HOST, HOST_ID, 1.0)
    run(place, queue, connect_command(asking, 0, 32, 0xFFFF)).check()
    steps = each_command(authenticate(Credentials(SECRET), HOST, SUBSYSTEM))
    for number, command in enumerate(steps):
        run(place, queue, command).check()
        if number < 3:
            place.settle(place.now + 5.0)
    place.settle(place.now + 0.9)
    run(place, queue, commands.keep_alive()).check()
    # From then on it counts.
    place.settle(place.now + 2.1)
    assert not place.target.controllers


def test_strangers_are_turned_away_when_there_are_many() -> None:
    place = bench(ControllerSettings(max_unproven=3))
    proven = started(place, Credentials(SECRET))
    for _ in range(3):
        assert raw_queue(place)[1].status == Status.SUCCESS
    connect = raw_queue(place)[1]
    assert connect.status == FabricsStatus.CONNECT_CONTROLLER_BUSY
    assert not connect.do_not_retry
    assert place.target.authentications.turned_away == 1
    # The one that is in goes on, with I/O queues too.
    io_queue(place, proven)
    # A stranger that hangs up makes room.
    place._wires[2][2].cut()
    place.settle()
    assert raw_queue(place)[1].status == Status.SUCCESS


def test_a_stranger_gives_way_to_a_host_from_elsewhere() -> None:
    place = bench(ControllerSettings(max_unproven=3))
    for _ in range(3):
        assert raw_queue(place)[1].status == Status.SUCCESS
    strangers = [end.queue.session for _, end, _ in place._wires]
    queue = TcpQueue(31, in_capsule_bytes=8192)
    _, end, _ = place.connect(queue)
    end.queue.session.peer = "192.0.2.1"
    run(place, queue, connect_command(config(None), 0, 32, 0xFFFF)).check()
    prove(Credentials(SECRET), lambda command: run(place, queue, command).check())
    assert [each.displaced for each in strangers] == [True, False, False]
    assert place.target.unproven.described() == {"now": 2, "displaced": 1, "refused": 0}


def test_who_has_not_authenticated_says_few_things_at_a_time() -> None:
    place = bench()
    queue, _ = raw_queue(place)
    message = Negotiate(1, (Protocol((1,), (0,)),)).encode()
    data = message.ljust(MAX_MESSAGE_BYTES, b"\0")
    most = place.target.settings.unproven_entries
    end = place._wires[-1][1]
    for _ in range(most + 1):
        sending = commands.authentication_send(data)
        sending.in_capsule = False
        queue.in_capsule_bytes = 0
        queue.submit(sending, place.now)
    # They arrive at once, and none gets an answer before the last of them is here.
    stream = b"".join(bytes(each) for each in queue.output)
    for at in range(0, len(stream), 72):
        end.queue.next_buffer()[:72] = stream[at : at + 72]
        end.queue.received(72, place.now)
    assert end.queue.ending
    assert place.target.overfull == 1


@WRONG
def test_a_secret_is_replaced_under_a_live_host() -> None:
    place = bench()
    admin = started(place, Credentials(SECRET))
    fresh = new_secret()
    place.target.set_credentials(place.subsystem, HOST, Credentials(fresh, groups=(GroupId.NULL,)))
    admin.run(commands.identify(IdentifyCns.CONTROLLER)).check()
    prove(Credentials(fresh), admin.run)
    assert place.target.authentications.succeeded == 2
    # With the old one once more: the queue ends, and with it the controller.
    with pytest.raises(NvmeofError):
        prove(Credentials(SECRET), admin.run)
    place.settle()
    assert not place.target.controllers
    assert isinstance(why(started(place, Credentials(SECRET))), AuthenticationFailed)


@WRONG
def test_the_log_does_not_hear_of_every_failure(caplog: pytest.LogCaptureFixture) -> None:
    place = bench()
    for number in range(5):
        place.now = float(number)
        started(place, Credentials(new_secret()))
        place.settle()
    assert place.target.authentications.failed == 5
    assert len([line for line in caplog.messages if "authentication failed" in line]) == 1
