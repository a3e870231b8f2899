"""The host's admin session against our controller, over a link: bring-up to shutdown, events, time-outs."""

from __future__ import annotations

import random

import pytest

from nvmeof.controller.subsystem import Namespace
from nvmeof.errors import ConnectionLost, ConnectRefused, LocalProtocolError
from nvmeof.host import commands
from nvmeof.host.bring_up import SessionConfig
from nvmeof.host.controller_session import Change, Ended, SessionState
from nvmeof.host.procedure import Procedure
from nvmeof.tcp.pdu import NO_DIGESTS, Digests
from nvmeof.transport.discovery import read_discovery_log
from nvmeof.wire.fabrics import DISCOVERY_NQN
from nvmeof.wire.features import Feature
from nvmeof.wire.identify import IdentifyCns
from nvmeof.wire.log_page import (
    DiscoveryLog,
    LogPage,
)
from nvmeof.wire.status import FabricsStatus, Status, describe
from tests.support.nvme import more_commands
from tests.support.nvme.nvme_ends import HOST, HOST_ID, LBA, SUBSYSTEM, AdminHost, Bench, MemoryStorage

CONFIG = SessionConfig(SUBSYSTEM, HOST, HOST_ID, keep_alive_s=10.0, io_queues=4)


def live(bench: Bench, config: SessionConfig = CONFIG, digests: Digests = NO_DIGESTS) -> AdminHost:
    admin = AdminHost(bench, config, digests)
    admin.start()
    assert admin.events == [Change.LIVE], admin.events
    admin.events.clear()
    return admin


@pytest.mark.parametrize("digests", [Digests(), Digests(True, True)])
@pytest.mark.parametrize("chunk", [1, 1 << 16])
def test_bring_up(chunk: int, digests: Digests) -> None:
    bench = Bench(namespaces=3, blocks=64, chunk=chunk)
    admin = live(bench, digests=digests)
    session = admin.session
    assert session.facts is not None
    assert session.facts.identify.subnqn == SUBSYSTEM
    assert session.facts.io_queues == 4
    assert session.facts.in_capsule_bytes == 16384
    assert sorted(session.namespaces) == [1, 2, 3]
    for nsid, namespace in session.namespaces.items():
        assert namespace.nguid == bytes([nsid]) * 16
        assert (namespace.size_bytes, namespace.lba_bytes) == (64 * LBA, LBA)
    assert admin.queue.in_flight == 2  # the event requests


def test_bring_up_in_pieces_of_random_size(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(10):
        live(Bench(chunk=3000, dice=dice))


@pytest.mark.parametrize(
    ("config", "status", "said"),
    [
        (
            SessionConfig("nqn.a:other", HOST, HOST_ID, 10.0),
            FabricsStatus.CONNECT_INVALID_PARAMETERS,
            "it has no subsystem nqn.a:other; compare the nqn, the address and the port",
        ),
        (
            SessionConfig(SUBSYSTEM, "nqn.a:stranger", HOST_ID, 10.0),
            FabricsStatus.CONNECT_INVALID_HOST,
            "it does not let nqn.a:stranger in; add this host",
        ),
    ],
    ids=["wrong subsystem", "host not allowed"],
)
def test_refused(config: SessionConfig, status: FabricsStatus, said: str) -> None:
    admin = AdminHost(Bench(allowed=[HOST]), config)
    admin.start()
    (event,) = admin.events
    assert isinstance(event, Ended)
    assert isinstance(event.error, ConnectRefused)
    assert f"{describe(status, fabrics=True)}: {said}" in str(event.error)
    assert event.error.retry_is_useless


def test_cut_at_every_step_of_the_bring_up() -> None:
    """However far it came, the session ends once, with an error, and no command is left in flight."""
    bench = Bench()
    whole = live(bench)
    bytes_sent = whole.link.ways[0].moved
    for cut in range(129, bytes_sent, 37):
        bench = Bench()
        admin = AdminHost(bench, CONFIG)
        admin.link.ways[0].cut_after = cut
        admin.start()
        # The last cuts come after the bring-up, when event requests have gone out.
        assert [type(event) for event in admin.events] in ([Ended], [Change, Ended])
        event = admin.events[-1]
        assert isinstance(event, Ended)
        assert event.error is not None
        assert admin.queue.in_flight == 0
        assert admin.session.state is SessionState.ENDED


def test_keep_alive_holds_the_controller() -> None:
    bench = Bench()
    admin = live(bench)
    admin.advance(100.0)
    assert admin.events == []
    assert len(bench.target.controllers) == 1
    # And without it, the controller goes.
    admin.session._keep_alive.stop()
    bench.now = 200.0
    admin.pump()
    (event,) = admin.events
    assert isinstance(event, Ended)
    assert len(bench.target.controllers) == 0


def test_a_keep_alive_without_answer_ends_the_session() -> None:
    admin = live(Bench())
    admin.controller.queue.run = lambda now: None  # type: ignore[method-assign]
    admin.controller.queue.received = lambda count, now: None  # type: ignore[method-assign]
    admin.advance(4.0)
    assert admin.events == []
    admin.advance(10.5)
    (event,) = admin.events
    assert isinstance(event, Ended)
    assert isinstance(event.error, ConnectionLost)
    assert "keep alive" in str(event.error)


def test_namespaces_come_and_go() -> None:
    bench = Bench()
    admin = live(bench)
    bench.target.attach(bench.subsystem, Namespace(7, MemoryStorage(16, 7)))
    admin.pump()
    assert admin.events == [Change.NAMESPACES]
    assert sorted(admin.session.namespaces) == [1, 7]
    bench.target.remove_namespace(bench.subsystem, 1)
    bench.target.remove_namespace(bench.subsystem, 7)
    admin.pump()
    assert admin.session.namespaces == {}
    for nsid in range(2, 40):
        bench.target.attach(bench.subsystem, Namespace(nsid, MemoryStorage(16, nsid)))
        if nsid % 3 == 0:
            admin.pump()
    admin.pump()
    assert sorted(admin.session.namespaces) == list(range(2, 40))
    assert admin.queue.in_flight == 2


def test_admin_commands() -> None:
    bench = Bench()
    admin = live(bench)
    smart = admin.run(commands.get_log_page(LogPage.SMART, 512))
    assert smart.data_in is not None
    assert int.from_bytes(smart.data_in[1:3], "little") == 298
    effects = admin.run(commands.get_log_page(LogPage.COMMAND_EFFECTS, 4096))
    assert effects.data_in is not None
    assert effects.data_in[4 * (256 + 1)]
    assert effects.data_in[4 * (256 + 2)]
    assert admin.run(more_commands.get_features(Feature.KEEP_ALIVE_TIMER)).result == 10_000
    assert admin.run(commands.set_features(Feature.KEEP_ALIVE_TIMER, 20_000)).status == 0
    assert admin.run(more_commands.get_features(Feature.KEEP_ALIVE_TIMER)).result == 20_000
    assert admin.run(more_commands.get_features(Feature.VOLATILE_WRITE_CACHE)).status == 0
    independent = admin.run(commands.identify(IdentifyCns.INDEPENDENT_NAMESPACE, 1))
    assert independent.data_in is not None
    assert independent.data_in[14] == 1, "ready"
    assert admin.run(commands.identify(0x99)).status == Status.INVALID_FIELD
    assert admin.run(commands.identify(IdentifyCns.NAMESPACE, 99)).status is not None
    assert admin.run(commands.abort(1, 17)).result & 1 == 1
    errors = admin.run(commands.get_log_page(LogPage.ERROR, 64))
    assert errors.status == 0


def test_shutdown_and_reset() -> None:
    for end in ("shut_down", "reset"):
        bench = Bench()
        admin = live(bench)
        getattr(admin.session, end)(bench.now)
        admin.pump()
        admin.advance(5.0)
        assert admin.events == [Ended(None)]
        assert len(bench.target.controllers) == 0
        assert admin.queue.in_flight == 0
        with pytest.raises(LocalProtocolError):
            admin.session.reset(bench.now)
        with pytest.raises(LocalProtocolError):
            admin.session.submit(commands.keep_alive(), bench.now)
        live(bench)


def test_an_unanswered_command_is_aborted_and_then_the_session_ends() -> None:
    """One more event request than is answered stands for a command that hangs."""
    bench = Bench()
    admin = live(bench)
    hung = commands.async_event_request()
    admin.session.submit(hung, bench.now)
    admin.pump()
    assert not hung.done
    admin.advance(3.0)
    # The abort (our controller grants it) ended it.
    assert hung.status == Status.ABORT_REQUESTED
    assert admin.events == []

    admin.controller.queue.received = lambda count, now: None  # type: ignore[method-assign]
    deaf = more_commands.get_features(Feature.QUEUE_COUNT)
    admin.session.submit(deaf, bench.now)
    admin.pump()
    admin.advance(bench.now + 1.9)
    assert admin.events == []
    admin.advance(bench.now + 3.0)
    (event,) = admin.events
    assert isinstance(event, Ended)
    assert "was not answered" in str(event.error)
    assert deaf.lost


def run_procedure(admin: AdminHost, procedure: Procedure[DiscoveryLog]) -> DiscoveryLog:
    while True:
        try:
            step = next(procedure)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        assert not hasattr(step, "seconds")
        admin.run(step)  # type: ignore[arg-type]


def test_discovery() -> None:
    from nvmeof.controller.subsystem import Subsystem
    from nvmeof.wire.log_page import DiscoveryEntry

    bench = Bench()
    bench.target.add_port(DiscoveryEntry("192.0.2.1", "4420"))
    admin = live(bench, SessionConfig(DISCOVERY_NQN, HOST, HOST_ID, keep_alive_s=10.0))
    assert admin.session.facts is not None
    assert admin.session.facts.io_queues == 0
    log = run_procedure(admin, read_discovery_log())
    found = {(entry.subsystem_nqn, entry.address, entry.service) for entry in log.entries}
    assert (SUBSYSTEM, "192.0.2.1", "4420") in found
    bench.target.add_subsystem(Subsystem("nqn.2026-01.io.g35:second", serial="2"))
    admin.pump()
    assert Change.DISCOVERY in admin.events
    again = run_procedure(admin, read_discovery_log())
    assert "nqn.2026-01.io.g35:second" in {entry.subsystem_nqn for entry in again.entries}
    assert again.generation != log.generation
