"""Bringing a controller up, down and back: procedures over Fabrics and admin commands.

The order is the one that NVMe Base 2.0 (3.5.1) and NVMe-oF 1.1 (2.2.1) prescribe: Connect, capabilities,
enable, wait for ready, identify, number of queues, events, namespaces.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from nvmeof import errors
from nvmeof.authentication.host_side import HostAuthentication
from nvmeof.authentication.secret import Credentials
from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.host.namespaces import NO_ACCESS_REPORT, Access, NamespaceInfo, read_access, scan_namespaces
from nvmeof.host.procedure import Pause, Procedure, data_of, done
from nvmeof.limits import ADMIN_QUEUE_DEPTH
from nvmeof.wire import fabrics as wire
from nvmeof.wire import features
from nvmeof.wire.ana import CMIC_ANA
from nvmeof.wire.identify import (
    ControllerKind,
    IdentifyCns,
    IdentifyController,
    decode_identify_controller_untrusted,
)
from nvmeof.wire.properties import (
    CAPABLE_OF_ALL_SETS,
    CONFIGURE_ALL_SETS,
    CONFIGURE_NVM,
    SHUTDOWN_COMPLETE,
    Capabilities,
    Configuration,
    ControllerStatus,
    Property,
    Shutdown,
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
    """The names of both ends. `host_id` has 16 bytes, `keep_alive_s` 0 means none."""

    subsystem_nqn: str
    host_nqn: str
    host_id: bytes
    keep_alive_s: float
    io_queues: int = 1
    credentials: Credentials | None = None
    """For a controller that asks the host to authenticate. Where they have a secret of the controller's, it
    has to authenticate too, in any case."""

    @property
    def discovery(self) -> bool:
        """The subsystem is the discovery subsystem."""
        return self.subsystem_nqn == wire.DISCOVERY_NQN


@dataclass(frozen=True, slots=True)
class ControllerFacts:
    """The controller as it describes itself."""

    cntlid: int
    identify: IdentifyController
    capabilities: Capabilities
    io_queues: int
    """I/O queues that it granted; queue ids are 1 to this."""
    max_transfer: int
    """Bytes that one command may move (MDTS); a large number where there is no limit."""
    in_capsule_bytes: int
    """Data that a command capsule of an I/O queue may carry."""
    access: Access = field(default_factory=lambda: NO_ACCESS_REPORT)
    """How it reached its namespaces at that time (ANA)."""


def connect_command(config: SessionConfig, qid: int, entries: int, cntlid: int) -> Command:
    """Connect for one queue of `entries` entries.

    We ask for no flow control by SQ head: it is what allows a controller to answer a read with the
    SUCCESS flag instead of a completion of its own, and we never have more in flight than entries.
    """
    keep_alive_ms = round(config.keep_alive_s * 1000) if qid == 0 else 0
    return commands.connect(
        wire.Connect(qid, entries - 1, keep_alive_ms, wire.CATTR_NO_FLOW_CONTROL),
        wire.ConnectData(config.host_id, cntlid, config.subsystem_nqn, config.host_nqn),
    )


def join(config: SessionConfig, qid: int, entries: int, cntlid: int) -> Procedure[int]:
    """Connect a queue and authenticate it; the controller's id.

    Raises `ConnectRefused` and its `AuthenticationFailed`, `ConnectionLost`, `MalformedPdu`.
    """
    command = connect_command(config, qid, entries, cntlid)
    yield command
    if command.status:
        why = _why_refused(config, command.status, command.result)
        raise errors.ConnectRefused(
            f"the controller refuses the connection: {why}",
            retry_is_useless=command.do_not_retry or command.status in _POINTLESS,
        )
    command.check()
    given = command.result & 0xFFFF
    if cntlid not in (given, wire.DYNAMIC_CONTROLLER):
        raise errors.MalformedPdu("a queue was connected to another controller")
    credentials = config.credentials
    if command.result & wire.RESULT_AUTH_SECURE_CHANNEL:
        raise errors.AuthenticationFailed(
            "the controller wants a secure channel (TLS), which this host cannot do"
        )
    if command.result & wire.RESULT_AUTH_REQUIRED:
        if credentials is None:
            raise errors.AuthenticationFailed(
                f"the controller wants {config.host_nqn} to authenticate, and this host has no secret for it "
                "(host_secret_file)"
            )
        yield from authenticate(credentials, config.host_nqn, config.subsystem_nqn)
    elif credentials is not None and credentials.controller_secret is not None and not config.discovery:
        # Anybody could answer Connect with that.
        raise errors.AuthenticationFailed(
            "the controller does not authenticate, and this host wants it to (controller_secret_file)"
        )
    return given


def _why_refused(config: SessionConfig, status: int, result: int) -> str:
    """The status of a Connect in words, with the parameter that is not taken, and what to do."""
    said = describe(status, fabrics=True)
    if status == FabricsStatus.CONNECT_INVALID_HOST:
        return f"{said}: it does not let {config.host_nqn} in; add this host to those that it allows"
    if status != FabricsStatus.CONNECT_INVALID_PARAMETERS:
        return said
    match wire.refused_parameter(result):
        case wire.ConnectParameter.SUBNQN:
            return (
                f"{said}: it has no subsystem {config.subsystem_nqn}; compare the nqn, the address and the "
                "port with those of the enclosure"
            )
        case wire.ConnectParameter.HOSTNQN:
            return f"{said}: it does not take {config.host_nqn} as the name of a host"
        case None:
            return said
        case parameter:
            return f"{said}: it does not take the {parameter.name} of this host"


def authenticate(credentials: Credentials, host_nqn: str, subsystem_nqn: str) -> Procedure[None]:
    """Prove ourselves on this queue, and let the controller do so (NVMe Base 2.0, in-band authentication).

    Raises `AuthenticationFailed`, and `ConnectionLost`, which says so: Linux's target may hang up on a wrong
    secret before its verdict is on the wire, and then nobody can tell that from a link that failed.
    """
    exchange = HostAuthentication(credentials, host_nqn, subsystem_nqn)
    try:
        yield from done(commands.authentication_send(exchange.negotiate()))
        reply = exchange.challenged((yield from data_of(commands.authentication_receive())))
        yield from done(commands.authentication_send(reply))
        confirmation = exchange.concluded((yield from data_of(commands.authentication_receive())))
        if confirmation is not None:
            yield from done(commands.authentication_send(confirmation))
    except errors.AuthenticationFailed as error:
        if error.farewell is not None:
            # Whatever it is answered with, and if it hangs up meanwhile: we hang up next, and know why.
            with suppress(errors.ConnectionLost):
                yield commands.authentication_send(error.farewell)
        raise
    except errors.CommandFailed as error:
        raise errors.AuthenticationFailed(f"the controller breaks the authentication off: {error}") from error
    except errors.ConnectionLost as error:
        raise errors.ConnectionLost(
            f"{error}, amid the authentication; if it does so every time, compare the secrets of both sides"
        ) from error


def _property(offset: Property) -> Procedure[int]:
    command = yield from done(commands.property_get(offset))
    return command.result


def _status_within(timeout_s: float, is_reached: Callable[[ControllerStatus], bool]) -> Procedure[bool]:
    """Read CSTS again and again; whether it came to hold in time."""
    left = timeout_s
    while not is_reached(ControllerStatus.of_number((yield from _property(Property.CSTS)))):
        if left <= 0:
            return False
        yield Pause(POLL_S)
        left -= POLL_S
    return True


def _wait_ready(ready: bool, timeout_s: float) -> Procedure[None]:
    def is_reached(status: ControllerStatus) -> bool:
        if ready and status.fatal:
            raise errors.ConnectionLost("the controller reports a fatal status (CSTS.CFS)")
        return status.ready == ready

    if not (yield from _status_within(timeout_s, is_reached)):
        state = "ready" if ready else "disabled"
        raise errors.ConnectionLost(f"the controller is not {state} after {timeout_s:g} s")


def _configuration(capabilities: Capabilities, shutdown: Shutdown = Shutdown.NONE) -> Configuration:
    """CC to write. As the Linux host, it asks for all command sets where the controller has several."""
    several = capabilities.command_sets & CAPABLE_OF_ALL_SETS
    return Configuration(
        enable=True,
        shutdown=shutdown,
        command_set=CONFIGURE_ALL_SETS if several else CONFIGURE_NVM,
        page_size=capabilities.min_page_size,
    )


def _enable(capabilities: Capabilities) -> Procedure[None]:
    timeout = max(capabilities.timeout * 0.5, READY_TIMEOUT_LEAST_S)
    status = ControllerStatus.of_number((yield from _property(Property.CSTS)))
    if status.ready:
        yield from done(commands.property_set(Property.CC, Configuration(enable=False).to_number()))
        yield from _wait_ready(False, timeout)
    yield from done(commands.property_set(Property.CC, _configuration(capabilities).to_number()))
    yield from _wait_ready(True, timeout)


def _check(identify: IdentifyController, cntlid: int, *, io: bool) -> None:
    if identify.cntlid != cntlid:
        raise errors.RemoteProtocolError(
            f"Connect gave controller {cntlid}, Identify says {identify.cntlid}", fatal_error_status=None
        )
    if io and (identify.ioccsz < 4 or identify.iorcsz < 1 or identify.icdoff):
        raise errors.RemoteProtocolError(
            f"capsules of {identify.ioccsz} and {identify.iorcsz} * 16 bytes, offset {identify.icdoff}",
            fatal_error_status=None,
        )


def bring_up(config: SessionConfig) -> Procedure[tuple[ControllerFacts, dict[int, NamespaceInfo]]]:
    """From Connect on the admin queue to a live controller, with its namespaces (none for discovery)."""
    cntlid = yield from join(config, 0, ADMIN_QUEUE_DEPTH, wire.DYNAMIC_CONTROLLER)
    capabilities = Capabilities.of_number((yield from _property(Property.CAP)))
    yield from _enable(capabilities)
    data = yield from data_of(commands.identify(IdentifyCns.CONTROLLER))
    identify = decode_identify_controller_untrusted(data)
    io = not config.discovery and identify.cntrltype in (ControllerKind.NOT_REPORTED, ControllerKind.IO)
    _check(identify, cntlid, io=io)

    io_queues = 0
    events = features.AEC_DISCOVERY_CHANGED
    namespaces: dict[int, NamespaceInfo] = {}
    if io:
        command = yield from done(commands.set_queue_count(config.io_queues))
        granted = features.decode_queue_count(command.result)
        io_queues = min(*granted, config.io_queues)
        events = features.AEC_NAMESPACE_CHANGED | (
            features.AEC_ANA_CHANGED if identify.cmic & CMIC_ANA else 0
        )
    if events & identify.oaes:
        yield from done(commands.set_features(features.Feature.ASYNC_EVENT_CONFIG, events & identify.oaes))
    access = NO_ACCESS_REPORT
    if io:
        namespaces = yield from scan_namespaces()
        access = yield from read_access(identify)
    page = 4096 << capabilities.min_page_size
    facts = ControllerFacts(
        cntlid=cntlid,
        identify=identify,
        capabilities=capabilities,
        io_queues=io_queues,
        max_transfer=min(page << identify.mdts, UNLIMITED_TRANSFER) if identify.mdts else UNLIMITED_TRANSFER,
        in_capsule_bytes=identify.ioccsz * 16 - 64 if io else 0,
        access=access,
    )
    return facts, namespaces


def reset(timeout_s: float) -> Procedure[None]:
    """A controller reset: disable it. The association ends with it; connect anew to go on."""
    yield from done(commands.property_set(Property.CC, Configuration(enable=False).to_number()))
    yield from _wait_ready(False, timeout_s)


def shut_down(capabilities: Capabilities, timeout_s: float) -> Procedure[None]:
    """A normal shutdown, so that the controller may flush what it holds."""
    configuration = _configuration(capabilities, Shutdown.NORMAL)
    yield from done(commands.property_set(Property.CC, configuration.to_number()))
    yield from _status_within(timeout_s, lambda status: status.shutdown == SHUTDOWN_COMPLETE)
