"""The sessions to the enclosures: one task each keeps its controller connected and publishes its findings.

It runs in trio, beside the workers and never in their way. Workers read `Fabric`. A worker that loses a queue
complains there, and the controller is reset: a queue that died under a session that seems alive means that
one of the two ends is wrong about it. An enclosure is tried for ever, also one that refuses us; the reason is
logged when it changes. Discovery controllers stay connected as well (agent/remote/discovery.py).
"""

import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import trio

from agent.config.configuration import DiscoverySection, EnclosureSection, FabricSection
from agent.host_os.rate_limited_log import Complaints
from agent.host_os.ticks import next_tick
from agent.local.namespaces import AwayNamespace, LocalNamespace, LocalNamespaces
from agent.remote.discovery import Discovered, itself
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from agent.remote.outlier_detection import LOOK_SECONDS, Verdict
from nvmeof.authentication.secret import Credentials
from nvmeof.authentication.secret_files import SecretFileError, read_credentials
from nvmeof.errors import AuthenticationFailed, ConnectionLost, ConnectRefused, NvmeofError
from nvmeof.host.controller_session import Change
from nvmeof.host.namespaces import Access, NamespaceInfo
from nvmeof.tcp.pdu import Digests
from nvmeof.transport import VerbsChoice, transport_named
from nvmeof.transport.base import DEFAULT_PROVIDER, ControllerInfo
from nvmeof.transport.discovery import follow_discovery
from nvmeof.transport.reconnect import (
    Connected,
    Disconnected,
    Keeper,
    Opener,
    ReconnectPolicy,
    keep_controller,
)
from nvmeof.wire.ana import AnaState
from nvmeof.wire.log_page import DiscoveryEntry

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 5.0
ANSWER_SECONDS = KEEP_ALIVE_SECONDS / 2
"""For an answer on the admin queue, and for a connection: as long as one to a keep-alive may take. What waits
longer hangs: its connection lost bytes, or somebody between the two ends did."""
COMPLAINTS_EVERY = 0.25
NAMED_MAX = 8
"""Namespaces that one line of the log names."""
RECONNECT = ReconnectPolicy(first_s=0.2, most_s=5.0, loss_s=math.inf)
"""An enclosure is part of the pool until an operator says otherwise, so it is never given up."""

LOCAL_AGAIN_SECONDS = 1.0
"""How soon a device of this machine that is away is looked for again."""

SecretFinder: TypeAlias = Callable[[EnclosureSection], Credentials | None]
"""The credentials for an enclosure, out of the files that the configuration names. Raises
`SecretFileError`."""


def secret_finder(fabric: FabricSection) -> SecretFinder:
    """Reads the files with every call, so that a secret is replaced without stopping the agent.

    The files of an enclosure's own section go before those of `[fabric]`, both together.
    """

    def find(section: EnclosureSection) -> Credentials | None:
        chosen = section if section.host_secret_file is not None else fabric
        if chosen.host_secret_file is None:
            return None
        return read_credentials(chosen.host_secret_file, chosen.controller_secret_file)

    return find


class Supervisor:
    """Keeps every enclosure connected, of the configuration and of discovery, while `run` runs."""

    def __init__(
        self,
        sections: Sequence[EnclosureSection],
        host_nqn: str,
        host_id: bytes,
        io_queues: int,
        verbs: VerbsChoice | None = None,
        secrets: SecretFinder = lambda section: None,
        discovery: Sequence[DiscoverySection] = (),
        local: LocalNamespaces | None = None,
    ) -> None:
        sections = [path for section in sections for path in section.each_path()]
        self._sections = sections
        self._secrets = secrets
        self._verbs = verbs or VerbsChoice(DEFAULT_PROVIDER)
        self._host_nqn = host_nqn
        self._host_id = host_id
        self._io_queues = io_queues
        self.queues_in_use = 0
        """Queue ids that the agent went on to use; an enclosure that joins later may grant fewer."""
        self._discovery = discovery
        self._tried = {each.name: trio.Event() for each in [*sections, *map(itself, discovery)]}
        self._ends: dict[str, trio.CancelScope] = {}
        """Of the enclosures by discovery, by name."""
        self.discovered = Discovered[Enclosure](sections, self._begin, self._end)
        self._nursery: trio.Nursery | None = None
        self.newcomers_level = logging.WARNING
        """Of the line that names newcomers; less where they join by themselves."""
        self._reported: set[str] = set()
        self._unseen: set[bytes] = set()
        """Namespaces of the pool that were said to be shown by no enclosure."""
        self._contested: dict[str, str] = {}
        """The last message about each namespace that several enclosures claim."""
        self._complaints = Complaints(log)
        taken = local.taken if local is not None else {}
        self.fabric = Fabric(
            [
                Enclosure(each.name, nqn=each.nqn, address=each.address, taken=taken.get(each.name, ""))
                for each in sections
            ]
        )
        self._local = local
        opened, away = (local.opened, local.away) if local is not None else ([], [])
        self._beside = [(each, _beside(each, self.fabric)) for each in opened]
        self._away = [(each, Enclosure(each.name, fault=each.fault, is_local=True)) for each in away]
        of_this_machine = [enclosure for _, enclosure in (*self._beside, *self._away)]
        self.fabric.enclosures = [*of_this_machine, *self.fabric.enclosures]

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._look_around)
            for discovery in self._discovery:
                nursery.start_soon(self._follow, discovery)
            for found, enclosure in self._beside:
                nursery.start_soon(self._keep_local, found, enclosure)
            for away, enclosure in self._away:
                nursery.start_soon(self._keep_local, away, enclosure)
            reached = [each for each in self.fabric.enclosures if not each.is_local]
            for section, enclosure in zip(self._sections, reached, strict=True):
                nursery.start_soon(self._keep, section, enclosure)

    async def _keep_local(self, device: LocalNamespace | AwayNamespace, enclosure: Enclosure) -> None:
        """Look for a device of this machine while it is away, and see when it goes."""
        while True:
            if isinstance(device, AwayNamespace):
                device = await self._look_for(device, enclosure)
            device = await self._until_pulled(device, enclosure)

    async def _until_pulled(self, found: LocalNamespace, enclosure: Enclosure) -> AwayNamespace:
        assert self._local is not None
        while not found.storage.is_gone():  # noqa: ASYNC110 - Linux tells nobody
            await trio.sleep(LOCAL_AGAIN_SECONDS)
        away = self._local.pulled(found)
        self._disconnected(enclosure, away.fault)
        # Not before its last write has ended: none may land behind those of the next opening.
        while True:
            with suppress(RuntimeError):  # Linux has no thread for it now
                if await trio.to_thread.run_sync(found.storage.close, abandon_on_cancel=True):
                    return away
            await trio.sleep(LOCAL_AGAIN_SECONDS)

    async def _look_for(self, away: AwayNamespace, enclosure: Enclosure) -> LocalNamespace:
        """Until a device of this machine that is away has come."""
        log.warning("%s: away, and looked for again: %s", enclosure.name, enclosure.fault)
        while (found := away.look()) is None:
            if away.fault != enclosure.fault:
                self._note(enclosure, "away", away.fault, logging.WARNING)
            enclosure.fault = away.fault
            await trio.sleep(LOCAL_AGAIN_SECONDS)
        self._session_began(enclosure, found.session, found.nqn, (found.namespace,))
        self.fabric.refresh()
        self._note(enclosure, "here", str(found.path))
        return found

    async def _look_around(self) -> None:
        """Look for gray failure and for writes that stay without an answer, and log the findings."""
        while True:
            await trio.sleep_until(next_tick(LOOK_SECONDS))
            self.fabric.fence.look(time.monotonic())
            for change in self.fabric.look(time.monotonic()):
                name = self.fabric.name_of(change.member)
                if change.verdict is Verdict.SUSPECT:
                    self._complaints.world(f"{name} gets no new values for now", change.why)
                else:
                    verdict = f"{name} is {change.verdict.value}"
                    self._complaints.world(verdict, change.why, logging.INFO)
            self.discovered.forget_gone(lambda enclosure: enclosure.session is not None)
            self._report_newcomers()
            self._report_contested()
            self._report_unseen()

    def _report_newcomers(self) -> None:
        """Say of the namespaces that the pool map does not name that they are there, once."""
        strays = self.fabric.newcomers()
        if fresh := sorted(strays.keys() - self._reported):
            log.log(
                self.newcomers_level,
                "%d namespace(s) that enclosures show are not in the pool (see g35 pool show): %s",
                len(fresh),
                _some([f"{nguid} of {strays[nguid]}" for nguid in fresh]),
            )
        self._reported = set(strays)

    def _report_contested(self) -> None:
        """Say of each namespace that several enclosures claim who is left out, once."""
        contested = dict(self.fabric.contested)
        for nguid, said in contested.items():
            if self._contested.get(nguid) != said:
                log.warning(
                    "namespace %s: %s. Two enclosures with one NGUID are a copy and its original; "
                    "take the copy away",
                    nguid,
                    said,
                )
        self._contested = contested

    def _report_unseen(self) -> None:
        """Say of the namespaces of the pool that nobody has ever shown, all enclosures being there, once."""
        if fresh := sorted(self.fabric.unseen() - self._unseen):
            log.warning(
                "%d namespace(s) of the pool are shown by no enclosure that this agent knows, and what lies "
                "there is missed: add the enclosure to the configuration, and start the agent again: %s",
                len(fresh),
                _some([nguid.hex() for nguid in fresh]),
            )
        self._unseen.update(fresh)

    async def _follow(self, discovery: DiscoverySection) -> None:
        """Stay connected to a discovery controller and keep to what it lists."""
        said: str | None = None

        def listed(entries: Sequence[DiscoveryEntry]) -> None:
            nonlocal said
            said = None
            self.discovered.listed(discovery, entries)
            self._tried[discovery.name].set()

        def unreachable(error: NvmeofError | None) -> None:
            nonlocal said
            fault = str(error or "reset")
            if fault != said:
                log.warning("discovery %s: not connected, and tried again: %s", discovery.name, fault)
            said = fault
            self._tried[discovery.name].set()

        opener = self._opener(itself(discovery))
        await follow_discovery(opener, listed, unreachable, RECONNECT)

    def _begin(self, section: EnclosureSection) -> Enclosure:
        assert self._nursery is not None
        enclosure = Enclosure(section.name, nqn=section.nqn, discovered=True, address=section.address)
        scope = trio.CancelScope()
        self._ends[section.name] = scope
        self._tried[section.name] = trio.Event()
        self.fabric.enclosures = [*self.fabric.enclosures, enclosure]

        async def keep() -> None:
            with scope:
                await self._keep(section, enclosure)

        self._nursery.start_soon(keep)
        return enclosure

    def _end(self, enclosure: Enclosure) -> None:
        self._ends.pop(enclosure.name).cancel()
        self._tried.pop(enclosure.name).set()
        self.fabric.enclosures = [each for each in self.fabric.enclosures if each is not enclosure]
        self.fabric.refresh()

    async def all_tried(self, seconds: float) -> None:
        """Until every enclosure was connected or has failed to be once, or so many seconds.

        Those too that discovery controllers list when they are first reached.
        """
        with trio.move_on_after(seconds):
            while waited_for := [event for event in self._tried.values() if not event.is_set()]:
                await waited_for[0].wait()

    def _opener(self, section: EnclosureSection, enclosure: Enclosure | None = None) -> Opener:
        """Opens the controller of a section; the enclosure counts tries that failed to authenticate."""
        transport = transport_named(section.transport)

        @asynccontextmanager
        async def opener() -> AsyncIterator[Any]:
            try:
                async with transport.open_controller(
                    section.address,
                    section.port,
                    section.nqn,
                    self._host_nqn,
                    self._host_id,
                    **self._options(section),
                    keep_alive_s=KEEP_ALIVE_SECONDS,
                    admin_timeout_s=ANSWER_SECONDS,
                    io_queues=self._io_queues,
                    credentials=self._secrets(section),
                ) as controller:
                    yield controller
            except (ConnectRefused, SecretFileError) as refused:
                if enclosure is not None:
                    enclosure.authentication_failures += isinstance(refused, AuthenticationFailed)
                # A wrong name or secret, a host that is not allowed: a keeper gives up, and we do not.
                raise ConnectionLost(str(refused)) from refused

        return opener

    async def _keep(self, section: EnclosureSection, enclosure: Enclosure) -> None:
        opener = self._opener(section, enclosure)
        async with keep_controller(opener, RECONNECT) as keeper, trio.open_nursery() as nursery:
            nursery.start_soon(self._hear_complaints, enclosure, keeper)
            async for event in keeper.events:
                match event:
                    case Connected(controller):
                        self._connected(enclosure, controller)
                    case Disconnected(error):
                        self._disconnected(enclosure, str(error or "reset"))
                    case Change.NAMESPACES | Change.ACCESS if keeper.controller is not None:
                        self._note_namespaces(enclosure, tuple(keeper.controller.namespaces()))
                        self._note_access(enclosure, keeper.controller.access)
                        self.fabric.refresh()
                    case _:
                        pass
                self._tried[enclosure.name].set()
            nursery.cancel_scope.cancel()

    def _options(self, section: EnclosureSection) -> dict[str, Any]:
        """What only this enclosure's transport wants to know."""
        if section.transport == "rdma":
            return {"verbs": self._verbs}
        return {"digests": Digests(section.header_digest, section.data_digest)}

    def _note(self, enclosure: Enclosure, what: str, why: str, level: int = logging.INFO) -> None:
        """Log what an enclosure may do at any rate."""
        self._complaints.world(f"enclosure {enclosure.name}: {what}", why, level)

    def _note_namespaces(self, enclosure: Enclosure, now: tuple[Any, ...]) -> None:
        """The namespaces of an enclosure from now on; the log has the ones that went and came."""
        before = {each.nsid: each.nguid for each in enclosure.namespaces}
        after = {each.nsid: each.nguid for each in now}
        if gone := _named(before, before.keys() - after.keys()):
            self._note(enclosure, "a namespace was taken away", gone, logging.WARNING)
        if fresh := _named(after, after.keys() - before.keys()):
            self._note(enclosure, "a namespace is new", fresh)
        enclosure.namespaces = now

    def _note_access(self, enclosure: Enclosure, access: Access) -> None:
        before, enclosure.access = enclosure.access, access
        changed = [
            f"group {group} is {state.name.lower()}"
            for group, state in sorted(access.items())
            if before.get(group, AnaState.OPTIMIZED) is not state
        ]
        if changed:
            self._note(enclosure, "an ANA group has another state", _some(changed))

    def _session_began(
        self, enclosure: Enclosure, session: ControllerInfo, nqn: str, namespaces: tuple[NamespaceInfo, ...]
    ) -> None:
        enclosure.namespaces = namespaces
        enclosure.complaints = 0
        enclosure.reconnects += enclosure.epoch > 0
        enclosure.began = self.fabric.unflushed.session_began()
        enclosure.epoch += 1
        enclosure.nqn = nqn
        enclosure.session = session
        enclosure.fault = ""

    def _connected(self, enclosure: Enclosure, controller: Any) -> None:
        nqn, namespaces = controller.info.config.subsystem_nqn, tuple(controller.namespaces())
        self._session_began(enclosure, controller.info, nqn, namespaces)
        self._note_access(enclosure, controller.access)
        self.fabric.refresh()
        self._note(enclosure, "connected", f"{len(enclosure.namespaces)} namespaces")
        granted = controller.info.facts.io_queues
        if granted < self.queues_in_use:
            log.warning(
                "enclosure %s grants %d I/O queues of the %d in use: what the others ask of it misses; "
                "let it grant more, or start the agent again",
                enclosure.name,
                granted,
                self.queues_in_use,
            )

    def _disconnected(self, enclosure: Enclosure, fault: str) -> None:
        if enclosure.session is not None:
            self._note(enclosure, "lost", fault)
        elif fault != enclosure.fault:
            log.warning("enclosure %s: not connected, and tried again: %s", enclosure.name, fault)
        enclosure.session = None
        enclosure.fault = fault
        self.fabric.refresh()

    async def _hear_complaints(self, enclosure: Enclosure, keeper: Keeper) -> None:
        while True:
            await trio.sleep_until(next_tick(COMPLAINTS_EVERY))
            if enclosure.complaints and keeper.controller is not None:
                enclosure.complaints = 0
                what = "a queue was lost or does not answer"
                self._note(enclosure, what, "the controller is reset")
                await keeper.reset()


def _beside(local: LocalNamespace, fabric: Fabric) -> Enclosure:
    """A device of this machine: its session stands from the start, and nobody need keep it."""
    return Enclosure(
        local.name,
        local.session,
        epoch=1,
        began=fabric.unflushed.session_began(),
        namespaces=(local.namespace,),
        fault="",
        nqn=local.nqn,
        is_local=True,
    )


def _named(nguids: Mapping[int, bytes], nsids: Set[int]) -> str:
    return _some([f"namespace {nsid} ({nguids[nsid].hex()})" for nsid in sorted(nsids)])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED_MAX]) + (" and more" if len(names) > NAMED_MAX else "")
