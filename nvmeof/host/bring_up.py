"""Bringing a controller up, down and back: procedures over Fabrics and admin commands.

The order is the one that NVMe Base 2.0 (3.5.1) and NVMe-oF 1.1 (2.2.1) prescribe: Connect, capabilities,
enable, wait for ready, identify, number of queues, events, namespaces.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvmeof.errors import ConnectionLost, ConnectRefused, RemoteProtocolError
from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.host.namespaces import NamespaceInfo, scan_namespaces
from nvmeof.host.procedure import Pause, Procedure, done
from nvmeof.limits import ADMIN_QUEUE_DEPTH
from nvmeof.wire.fabrics import (
    CATTR_NO_FLOW_CONTROL,
    DISCOVERY_NQN,
    DYNAMIC_CONTROLLER,
    RESULT_AUTH_REQUIRED,
    RESULT_AUTH_SECURE_CHANNEL,
    Connect,
    ConnectData,
)
from nvmeof.wire.features import (
    AEC_DISCOVERY_CHANGED,
    AEC_NAMESPACE_CHANGED,
    Feature,
    decode_queue_count,
)
from nvmeof.wire.identify import (
    OAES_DISCOVERY_CHANGED,
    OAES_NAMESPACE_CHANGED,
    ControllerKind,
    IdentifyCns,
    IdentifyController,
    decode_identify_controller_untrusted,
)
from nvmeof.wire.properties import (
    SHUTDOWN_COMPLETE,
    Capabilities,
    Configuration,
    Property,
    Shutdown,
    decode_capabilities,
    decode_controller_status,
)
from nvmeof.wire.status import FabricsStatus, describe

UNLIMITED_TRANSFER = 1 << 30
"""Stands for "no MDTS". One command can move 65,536 blocks, which is as much with blocks of 16 KiB."""

POLL_S = 0.01
READY_TIMEOUT_LEAST_S = 1.0

_POINTLESS = frozenset(
    {
        FabricsStatus.CONNECT_INCOMPATIBLE_FORMAT,
        FabricsStatus.CONNECT_INVALID_PARAMETERS,
        FabricsStatus.CONNECT_INVALID_HOST,
        FabricsStatus.AUTHENTICATION_REQUIRED,
    }
)


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Who we are and whom we want. `host_id` has 16 bytes, `keep_alive_s` 0 means none."""

    subsystem_nqn: str
    host_nqn: str
    host_id: bytes
    keep_alive_s: float
    io_queues: int = 1
    """I/O queues to ask for."""

    @property
    def discovery(self) -> bool:
        """We want the discovery subsystem."""
        return self.subsystem_nqn == DISCOVERY_NQN


@dataclass(frozen=True, slots=True)
class ControllerFacts:
    """What the controller said of itself."""

    cntlid: int
    identify: IdentifyController
    capabilities: Capabilities
    version: int
    io_queues: int
    max_transfer: int
    in_capsule_bytes: int


def connect_command(config: SessionConfig, qid: int, entries: int, cntlid: int) -> Command:
    """Connect for one queue of `entries` entries.

    We ask for no flow control by SQ head: it is what allows a controller to answer a read with the
    SUCCESS flag instead of a completion of its own, and we never have more in flight than entries.
    """
    return commands.connect(
        Connect(
            qid,
            entries - 1,
            round(config.keep_alive_s * 1000) if qid == 0 else 0,
            CATTR_NO_FLOW_CONTROL,
        ),
        ConnectData(config.host_id, cntlid, config.subsystem_nqn, config.host_nqn),
    )


def connected(command: Command) -> int:
    """The controller id that Connect gave; raises `ConnectRefused` or `ConnectionLost`."""
    if command.status:
        raise ConnectRefused(
            f"the controller refuses the connection: {describe(command.status, fabrics=True)}",
            status=command.status,
            retry_is_useless=command.do_not_retry or command.status in _POINTLESS,
        )
    command.check()
    if command.result & (RESULT_AUTH_REQUIRED | RESULT_AUTH_SECURE_CHANNEL):
        raise ConnectRefused(
            "the controller requires authentication, which this host does not do",
            status=FabricsStatus.AUTHENTICATION_REQUIRED,
            retry_is_useless=True,
        )
    return command.result & 0xFFFF


def _property(offset: Property) -> Procedure[int]:
    command = yield from done(commands.property_get(offset))
    return command.result


def _wait_ready(ready: bool, timeout_s: float) -> Procedure[None]:
    left = timeout_s
    while True:
        status = decode_controller_status((yield from _property(Property.CSTS)))
        if ready and status.fatal:
            raise ConnectionLost("the controller reports a fatal status (CSTS.CFS)")
        if status.ready == ready:
            return
        if left <= 0:
            raise ConnectionLost(
                f"the controller is not {'ready' if ready else 'disabled'} after {timeout_s:g} s"
            )
        yield Pause(POLL_S)
        left -= POLL_S


def _enable(capabilities: Capabilities) -> Procedure[None]:
    timeout = max(capabilities.timeout * 0.5, READY_TIMEOUT_LEAST_S)
    status = decode_controller_status((yield from _property(Property.CSTS)))
    if status.ready:
        yield from done(commands.property_set(Property.CC, Configuration(enable=False).encode()))
        yield from _wait_ready(False, timeout)
    command_set = 0 if capabilities.command_sets & 1 else 6
    configuration = Configuration(enable=True, command_set=command_set, page_size=capabilities.min_page_size)
    yield from done(commands.property_set(Property.CC, configuration.encode()))
    yield from _wait_ready(True, timeout)


def _check(identify: IdentifyController, cntlid: int, *, io: bool) -> None:
    if identify.cntlid != cntlid:
        raise RemoteProtocolError(
            f"Connect gave controller {cntlid}, Identify says {identify.cntlid}", fatal_error_status=None
        )
    if io and (identify.ioccsz < 4 or identify.iorcsz < 1 or identify.icdoff):
        raise RemoteProtocolError(
            f"capsules of {identify.ioccsz} and {identify.iorcsz} * 16 bytes, offset {identify.icdoff}",
            fatal_error_status=None,
        )


def bring_up(config: SessionConfig) -> Procedure[tuple[ControllerFacts, dict[int, NamespaceInfo]]]:
    """From Connect on the admin queue to a live controller, with its namespaces (none for discovery)."""
    command = connect_command(config, 0, ADMIN_QUEUE_DEPTH, DYNAMIC_CONTROLLER)
    yield command
    cntlid = connected(command)
    capabilities = decode_capabilities((yield from _property(Property.CAP)))
    version = yield from _property(Property.VS)
    yield from _enable(capabilities)
    command = yield from done(commands.identify(IdentifyCns.CONTROLLER))
    assert command.data_in is not None
    identify = decode_identify_controller_untrusted(command.data_in)
    io = not config.discovery and identify.cntrltype in (ControllerKind.NOT_REPORTED, ControllerKind.IO)
    _check(identify, cntlid, io=io)

    io_queues = 0
    wanted_events = 0
    namespaces: dict[int, NamespaceInfo] = {}
    if io:
        command = yield from done(commands.set_queue_count(config.io_queues))
        granted = decode_queue_count(command.result)
        io_queues = min(granted.submission, granted.completion, config.io_queues)
        if identify.oaes & OAES_NAMESPACE_CHANGED:
            wanted_events |= AEC_NAMESPACE_CHANGED
    elif identify.oaes & OAES_DISCOVERY_CHANGED:
        wanted_events |= AEC_DISCOVERY_CHANGED
    if wanted_events:
        yield from done(commands.set_features(Feature.ASYNC_EVENT_CONFIG, wanted_events))
    if io:
        namespaces = yield from scan_namespaces()
    page = 4096 << capabilities.min_page_size
    facts = ControllerFacts(
        cntlid=cntlid,
        identify=identify,
        capabilities=capabilities,
        version=version,
        io_queues=io_queues,
        max_transfer=min(page << identify.mdts, UNLIMITED_TRANSFER) if identify.mdts else UNLIMITED_TRANSFER,
        in_capsule_bytes=identify.ioccsz * 16 - 64 if io else 0,
    )
    return facts, namespaces


def reset(timeout_s: float) -> Procedure[None]:
    """A controller reset: disable it. The association ends with it; connect anew to go on."""
    yield from done(commands.property_set(Property.CC, Configuration(enable=False).encode()))
    yield from _wait_ready(False, timeout_s)


def shut_down(timeout_s: float) -> Procedure[None]:
    """A normal shutdown, so that the controller may flush what it holds."""
    configuration = Configuration(enable=True, shutdown=Shutdown.NORMAL)
    yield from done(commands.property_set(Property.CC, configuration.encode()))
    left = timeout_s
    while left > 0:
        status = decode_controller_status((yield from _property(Property.CSTS)))
        if status.shutdown == SHUTDOWN_COMPLETE:
            return
        yield Pause(POLL_S)
        left -= POLL_S
