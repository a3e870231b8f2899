"""One controller: what a host gets when its admin queue connects, and what lasts as long as that queue.

It has the properties (CC, CSTS), the features, the keep-alive timer, the asynchronous events and the error
log, and it knows the queues that belong to it. Commands are carried out in `admin_commands.py`; here is only
the state they change, and the rules for changing it.

All methods are called with `Target.lock` held, except `heard` and the plain attributes that the data path
reads (`enabled`, `subsystem`). There is no I/O and no clock: `now` is an argument.
"""

import math
from collections import deque
from typing import Final

from nvmeof.controller.served_queue import ServedQueue
from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.subsystem import AnyNamespace, Namespace, Subsystem
from nvmeof.wire import features, properties
from nvmeof.wire.log_page import ErrorEntry, LogPage, TransportType
from nvmeof.wire.sqe import AdminOpcode

ADMIN_OPCODES: Final = frozenset(AdminOpcode) - {AdminOpcode.FABRICS}
"""Of the commands that a controller carries out on its admin queue, beside those of Fabrics."""
ERROR_LOG_ENTRIES: Final = 16
_CHANGED_LIMIT: Final = 1025  # one more than the changed-namespace log can list

_SQ_ENTRY_SHIFT: Final = 6
_CQ_ENTRY_SHIFT: Final = 4


class Controller:
    """See the module's docstring. Made by an admin Connect, under an id that `Target.register` chose."""

    def __init__(
        self,
        cntlid: int,
        subsystem: Subsystem,
        *,
        host_nqn: str,
        host_id: bytes,
        keep_alive_ms: int,
        settings: ControllerSettings,
        transport: TransportType,
        now: float,
        port_id: int = 1,
    ) -> None:
        self.cntlid = cntlid
        self.subsystem = subsystem
        self.host_nqn = host_nqn
        self.host_id = host_id
        self.settings = settings
        self.transport = transport
        self.port_id = port_id
        self.version = properties.VERSION_1_4
        self.enabled = False
        self.ended: str | None = None
        self.queues: dict[int, ServedQueue] = {}
        self.configuration = 0
        """CC, as the host wrote it."""
        self.all_command_sets = False
        """The host asked for namespaces of every command set; one that did not sees those of blocks alone."""
        self._shutdown_status = 0
        self._fatal = False
        self.keep_alive_ms = 0
        self._last_heard = now
        self.set_keep_alive(keep_alive_ms)
        self.features: dict[int, int] = {
            features.Feature.ARBITRATION: 0,
            features.Feature.POWER_MANAGEMENT: 0,
            features.Feature.TEMPERATURE_THRESHOLD: 0x0FFF,
            features.Feature.ERROR_RECOVERY: 0,
            features.Feature.WRITE_ATOMICITY: 0,
            features.Feature.COMMAND_SET_PROFILE: 0,
            # Everything that can be reported is, until the host chooses: so does Linux' target.
            features.Feature.ASYNC_EVENT_CONFIG: (
                features.AEC_DISCOVERY_CHANGED
                if subsystem.is_discovery
                else features.AEC_NAMESPACE_CHANGED
                | (features.AEC_ANA_CHANGED if subsystem.access is not None else 0)
            ),
        }
        self.granted_io_queues = settings.max_io_queues
        self.error_log: deque[ErrorEntry] = deque(maxlen=ERROR_LOG_ENTRIES)
        self.error_count = 0
        self.changed_namespaces: set[int] = set()
        self._event_requests: deque[int] = deque()
        self._events: deque[features.AsyncEvent] = deque()
        self._masked: set[int] = set()  # log pages whose event has been given and which were not read since

    def heard(self, now: float) -> None:
        """A command of this host has come. Every command counts (traffic-based keep-alive)."""
        self._last_heard = now

    def set_keep_alive(self, milliseconds: int) -> None:
        """KATO, rounded up to the granularity; 0 switches it off, but never for a discovery controller."""
        step = max(1, round(self.settings.keep_alive_granularity_s * 1000))
        self.keep_alive_ms = -(-milliseconds // step) * step
        if self.keep_alive_ms == 0 and self.subsystem.is_discovery:
            self.keep_alive_ms = round(self.settings.discovery_idle_s * 1000)

    @property
    def expires_at(self) -> float:
        """When the host counts as dead unless it is heard before; infinity without keep-alive."""
        return self._last_heard + self.keep_alive_ms / 1000 if self.keep_alive_ms else math.inf

    def end(self, reason: str) -> None:
        """The controller is gone: its queues close. Idempotent."""
        if self.ended is None:
            self.ended = reason
            self.enabled = False
            for queue in list(self.queues.values()):
                queue.close(reason)

    def admits(self, queue: ServedQueue) -> bool:
        """A queue has proven itself: whether it may have its id, which it has from now on."""
        if queue.qid and (self.ended is not None or not self.enabled):
            return False
        return self.queues.setdefault(queue.qid, queue) is queue

    @property
    def path_refusal(self) -> int:
        """The status of I/O commands while this port does not reach the namespaces; 0 while it does."""
        access = self.subsystem.access
        return 0 if access is None else access.refusal(self.port_id)

    def wake_queues(self) -> None:
        for queue in self.queues.values():
            queue.recheck()

    @property
    def capabilities(self) -> int:
        return properties.Capabilities(
            max_queue_entries=self.settings.max_queue_entries - 1,
            timeout=20,  # 10 s; we are ready at once
            command_sets=properties.CAPABLE_OF_NVM | properties.CAPABLE_OF_ALL_SETS,
        ).to_number()

    @property
    def namespaces(self) -> list[AnyNamespace]:
        """Those that the host may see, by id."""
        found = self.subsystem.namespaces.values()
        return [each for each in found if self.all_command_sets or isinstance(each, Namespace)]

    @property
    def status(self) -> int:
        ready = properties.Configuration.of_number(self.configuration).enable and not self._fatal
        return properties.ControllerStatus(
            ready=ready, fatal=self._fatal, shutdown=self._shutdown_status
        ).to_number()

    def configure(self, value: int) -> None:
        """Write CC: enable, disable, shut down. One that cannot be is a fatal status (CSTS.CFS)."""
        old, new = (
            properties.Configuration.of_number(self.configuration),
            properties.Configuration.of_number(value),
        )
        self.configuration = value
        self.all_command_sets = new.command_set == properties.CONFIGURE_ALL_SETS
        if new.enable and not old.enable:
            self._shutdown_status = 0
            sizes_fit = self.subsystem.is_discovery or (
                new.sq_entry_size == _SQ_ENTRY_SHIFT and new.cq_entry_size == _CQ_ENTRY_SHIFT
            )
            set_exists = new.command_set in (properties.CONFIGURE_NVM, properties.CONFIGURE_ALL_SETS)
            self._fatal = bool(not sizes_fit or not set_exists or new.page_size or new.arbitration)
        elif old.enable and not new.enable:
            self._reset()
        if new.shutdown != properties.Shutdown.NONE:
            # Nothing is cached above the media, so a shutdown is complete as soon as it is asked for.
            self._shutdown_status = properties.SHUTDOWN_COMPLETE
        elif old.shutdown != properties.Shutdown.NONE:
            self._shutdown_status = 0
        self.enabled = (
            new.enable and not self._fatal and new.shutdown == properties.Shutdown.NONE and self.ended is None
        )

    def _reset(self) -> None:
        """CC.EN 1 to 0: I/O queues are deleted; events and their requests are forgotten."""
        self._fatal = False
        self._events.clear()
        self._event_requests.clear()
        self._masked.clear()
        self.changed_namespaces.clear()
        for qid, queue in list(self.queues.items()):
            if qid != 0:
                queue.close("the controller was reset")
                del self.queues[qid]

    def request_event(self, cid: int) -> bool:
        """Take an Asynchronous Event Request; False if the host has as many outstanding as it may."""
        if len(self._event_requests) >= self.settings.async_event_limit:
            return False
        self._event_requests.append(cid)
        return True

    def abort_event_request(self, cid: int) -> bool:
        """Take one back; False if it is not outstanding (any more)."""
        if cid not in self._event_requests:
            return False
        self._event_requests.remove(cid)
        return True

    def due_events(self) -> list[tuple[int, features.AsyncEvent]]:
        """Events that have found a request: (command id to complete, event). Each is given once."""
        due = []
        while self._events and self._event_requests:
            due.append((self._event_requests.popleft(), self._events.popleft()))
        return due

    def namespace_changed(self, nsid: int) -> None:
        if len(self.changed_namespaces) < _CHANGED_LIMIT:
            self.changed_namespaces.add(nsid)
        self._raise_event(features.NAMESPACE_CHANGED_EVENT, features.AEC_NAMESPACE_CHANGED)

    def discovery_changed(self) -> None:
        self._raise_event(features.DISCOVERY_CHANGED_EVENT, features.AEC_DISCOVERY_CHANGED)

    def access_changed(self) -> None:
        """The port by which its host came reaches the namespaces in another way now (ANA)."""
        self._raise_event(features.ANA_CHANGED_EVENT, features.AEC_ANA_CHANGED)

    def _raise_event(self, event: features.AsyncEvent, enabling_bit: int) -> None:
        if (
            not self.features[features.Feature.ASYNC_EVENT_CONFIG] & enabling_bit
            or event.log_page in self._masked
        ):
            return
        self._masked.add(event.log_page)
        self._events.append(event)
        admin = self.queues.get(0)
        if admin is not None:
            admin.wake()

    def log_page_read(self, page: int) -> None:
        """The host has read the page and did not ask to retain its event: it may be raised again."""
        self._masked.discard(page)
        if page == LogPage.CHANGED_NAMESPACES:
            self.changed_namespaces.clear()

    def record_error(self, *, qid: int, cid: int, status: int, nsid: int, lba: int) -> None:
        self.error_count += 1
        self.error_log.appendleft(
            ErrorEntry(self.error_count, qid, cid, status, lba=lba, nsid=nsid, transport_type=self.transport)
        )
