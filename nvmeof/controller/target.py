"""The registry of everything behind one set of listeners, shared by the threads of all connections.

`Target.lock` guards what changes rarely: subsystems, controllers, namespaces, events.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from nvmeof.authentication.secret import Credentials
from nvmeof.controller.controller import Controller
from nvmeof.controller.settings import NAMESPACE_ID_LIMIT, ControllerSettings
from nvmeof.controller.subsystem import AnyNamespace, Subsystem
from nvmeof.controller.unauthenticated_connections import GuestConnections
from nvmeof.wire.ana import AnaState
from nvmeof.wire.fabrics import DISCOVERY_NQN
from nvmeof.wire.log_page import DiscoveryEntry, DiscoveryLog

log = logging.getLogger(__name__)

WARN_EVERY_S: Final = 10.0
"""A host with a wrong secret tries again and again; the log hears of failures this often at most."""


class AuthenticationTally:
    """How authentication went over all queues, for statistics and the log. Changed under `Target.lock`."""

    def __init__(self) -> None:
        self.succeeded = 0
        self.failed = 0
        self.turned_away = 0
        """Admin queues for which there was no room among those that had yet to authenticate."""
        self.last_failure = ""
        self._warn_at = -math.inf

    def fail(self, who: str, why: str, now: float) -> None:
        """Count a failure, and log it unless another was logged a moment ago."""
        self.failed += 1
        self.last_failure = f"{who}: {why}"
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            log.warning("authentication failed, %s (%d so far)", self.last_failure, self.failed)

    def described(self) -> dict[str, int | str]:
        return {
            "succeeded": self.succeeded,
            "failed": self.failed,
            "turned_away": self.turned_away,
            "last_failure": self.last_failure,
        }


class Target:
    """All subsystems, controllers and ports behind one set of listeners.

    Every method may be called from any thread. `wake` hooks of queues are called with the lock held and
    must not call back.
    """

    def __init__(self, settings: ControllerSettings | None = None) -> None:
        self.settings = settings or ControllerSettings()
        self.lock = threading.RLock()
        self.discovery = Subsystem(DISCOVERY_NQN, serial="discovery", model="g35 discovery")
        self._subsystems: dict[str, Subsystem] = {}
        self._controllers: dict[int, Controller] = {}
        self._ports: list[DiscoveryEntry] = []
        self.guests = GuestConnections(self.settings.max_guests, self.settings.max_guests_of_a_peer)
        """Connections that are of no NVM subsystem's host yet, discovery controllers included."""
        self.unproven = GuestConnections(self.settings.max_unproven, self.settings.max_unproven)
        """Admin queues that have yet to authenticate."""
        self.overfull = 0
        """Connections that ended because their host had more commands in flight than the queue takes."""
        self.authentications = AuthenticationTally()
        self._next_cntlid = 1
        self._discovery_generation = 1

    def add_subsystem(self, subsystem: Subsystem) -> None:
        """Offer a subsystem from now on. ValueError if its name is taken."""
        with self.lock:
            if subsystem.nqn in self._subsystems or subsystem.is_discovery:
                raise ValueError(f"there is a subsystem {subsystem.nqn} already")
            self._subsystems[subsystem.nqn] = subsystem
            self._discovery_changed()

    def remove_subsystem(self, nqn: str) -> None:
        """Stop offering it; its controllers end. KeyError if there is none."""
        with self.lock:
            subsystem = self._subsystems.pop(nqn)
            for controller in [c for c in self._controllers.values() if c.subsystem is subsystem]:
                controller.end("its subsystem was removed")
            self._discovery_changed()

    def find_subsystem(self, nqn: str) -> Subsystem | None:
        with self.lock:
            return self.discovery if nqn == DISCOVERY_NQN else self._subsystems.get(nqn)

    def add_port(self, port: DiscoveryEntry) -> None:
        """List one more way to reach the target in the discovery log, to one subsystem or to all."""
        with self.lock:
            self._ports.append(port)
            self._discovery_changed()

    def remove_port(self, port: DiscoveryEntry) -> None:
        """Take it out of the log again. KeyError if it is not there."""
        with self.lock:
            if port not in self._ports:
                raise KeyError(port.address)
            self._ports.remove(port)
            self._discovery_changed()

    @property
    def ports(self) -> list[DiscoveryEntry]:
        with self.lock:
            return list(self._ports)

    @property
    def subsystems(self) -> list[Subsystem]:
        with self.lock:
            return list(self._subsystems.values())

    def set_allowed_hosts(self, subsystem: Subsystem, hosts: Iterable[str] | None) -> None:
        """Let other hosts in from now on; controllers of hosts that are out end. None: every host."""
        with self.lock:
            subsystem.allowed_hosts = None if hosts is None else frozenset(hosts)
            for controller in list(self._controllers.values()):
                if controller.subsystem is subsystem and not subsystem.allows(controller.host_nqn):
                    controller.end("its host is not allowed any more")
            self._discovery_changed()

    def set_credentials(self, subsystem: Subsystem, host_nqn: str, credentials: Credentials | None) -> None:
        """Have a host authenticate with these from now on; None: not any more.

        A connected host stays, and uses them when it connects or authenticates the next time.
        """
        with self.lock:
            entries = dict(subsystem.credentials)
            if credentials is None:
                entries.pop(host_nqn, None)
            else:
                entries[host_nqn] = credentials
            subsystem.credentials = MappingProxyType(entries)

    def attach(self, subsystem: Subsystem, namespace: AnyNamespace) -> None:
        """Attach a namespace; connected hosts are told. ValueError if the id is taken or out of range.

        Only hosts that asked for several command sets see one of the KV command set.
        """
        nsid = namespace.nsid
        if not 1 <= nsid <= NAMESPACE_ID_LIMIT:
            raise ValueError(f"a namespace id is between 1 and {NAMESPACE_ID_LIMIT}, not {nsid}")
        with self.lock:
            if nsid in subsystem.namespaces:
                raise ValueError(f"namespace {nsid} is there already")
            entries = dict(subsystem.namespaces) | {nsid: namespace}
            subsystem.namespaces = MappingProxyType(dict(sorted(entries.items())))
            self._namespace_changed(subsystem, nsid)

    def remove_namespace(self, subsystem: Subsystem, nsid: int) -> AnyNamespace:
        """Detach a namespace; its commands in flight end with an error. KeyError if there is none."""
        with self.lock:
            entries = dict(subsystem.namespaces)
            namespace = entries.pop(nsid)
            subsystem.namespaces = MappingProxyType(entries)
            self._namespace_changed(subsystem, nsid)
            self.poke()
            return namespace

    def _namespace_changed(self, subsystem: Subsystem, nsid: int) -> None:
        for controller in self._controllers.values():
            if controller.subsystem is subsystem:
                controller.namespace_changed(nsid)

    def _discovery_changed(self) -> None:
        self._discovery_generation += 1
        for controller in self._controllers.values():
            if controller.subsystem.is_discovery:
                controller.discovery_changed()

    def set_access(self, subsystem: Subsystem, port_id: int, state: AnaState) -> None:
        """Reach a subsystem that reports ANA by a port in another way from now on; its hosts there are told.

        ValueError where it does not report.
        """
        with self.lock:
            if subsystem.access is None:
                raise ValueError(f"{subsystem.nqn} does not report asymmetric access")
            if not subsystem.access.set(port_id, state):
                return
            for controller in self._controllers.values():
                if controller.subsystem is subsystem and controller.port_id == port_id:
                    controller.access_changed()
            self.poke()

    def poke(self) -> None:
        """Have every queue look at its waiting commands again: a drive was healed, a fault was set."""
        with self.lock:
            for controller in self._controllers.values():
                controller.wake_queues()

    def register(self, make: Callable[[int], Controller]) -> Controller | None:
        """Make a controller under a fresh id; None when there are as many as allowed."""
        with self.lock:
            if len(self._controllers) >= self.settings.max_controllers:
                return None
            while self._next_cntlid in self._controllers:
                self._advance_cntlid()
            cntlid = self._next_cntlid
            self._advance_cntlid()
            controller = self._controllers[cntlid] = make(cntlid)
            return controller

    def _advance_cntlid(self) -> None:
        # Ids go round the whole range before one is used again: a host that comes late with the id of a
        # controller that has ended must not find somebody else's. FFF0h and above are reserved.
        self._next_cntlid = self._next_cntlid % 0xFFEF + 1

    def unregister(self, controller: Controller) -> None:
        with self.lock:
            self._controllers.pop(controller.cntlid, None)

    def find_controller(self, cntlid: int) -> Controller | None:
        with self.lock:
            return self._controllers.get(cntlid)

    @property
    def controllers(self) -> list[Controller]:
        with self.lock:
            return list(self._controllers.values())

    def discovery_log(self, host_nqn: str) -> DiscoveryLog:
        with self.lock:
            entries = [
                replace(port, subsystem_nqn=subsystem.nqn)
                for subsystem in self._subsystems.values()
                if subsystem.allows(host_nqn)
                for port in self._ports
                if port.subsystem_nqn in ("", subsystem.nqn)
            ]
            return DiscoveryLog(self._discovery_generation, entries)
