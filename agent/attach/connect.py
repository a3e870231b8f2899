"""Reaching the namespaces of a pool: the sessions to its enclosures."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import trio

from agent.attach.map_history import remembered_pool
from agent.attach.state_lock import state_of_one_agent
from agent.config.configuration import Configuration, host_identity
from agent.local.namespaces import LocalNamespaces
from agent.remote.fabric import Fabric
from agent.remote.supervisor import Supervisor, secret_finder
from nvmeof.transport.verbs_provider import VerbsUnavailable, load_verbs

FIRST_TRY_SECONDS = 5.0
"""How long the start waits for enclosures. Those that come later join by themselves."""

log = logging.getLogger(__name__)


@asynccontextmanager
async def connected(
    configuration: Configuration, io_queues: int, *, serve: bool = False, make: bool = False
) -> AsyncIterator[Supervisor]:
    """The sessions to the enclosures, for as long as the block runs; each was tried once.

    `serve`: the state folder is this process's own (G35Error where another agent has it), and so are local
    namespaces, which are served to other agents (agent/local/namespaces.py).
    `make`: those that are not made yet are made, also without `serve`.
    """
    host_nqn, host_id = host_identity(configuration.agent.state)
    verbs = configuration.fabric.choice
    state = configuration.agent.state
    async with AsyncExitStack() as held:
        if serve:
            await held.enter_async_context(state_of_one_agent(state))
        local = held.enter_context(
            LocalNamespaces(configuration.local, host_nqn, host_id, state, serve=serve, make=make)
        )
        supervisor = Supervisor(
            [*local.elsewhere, *configuration.enclosures],
            host_nqn,
            host_id,
            io_queues,
            verbs,
            secret_finder(configuration.fabric),
            configuration.discovery,
            local,
        )
        if configuration.pool.membership == "auto":
            supervisor.newcomers_level = logging.INFO
        transports = {each.transport for each in configuration.enclosures}
        transports.update(each.transport for each in configuration.discovery)
        if "rdma" in transports:
            # To import it takes a while, which the enclosures would lack. What fails here is said for each.
            with suppress(VerbsUnavailable):
                load_verbs(verbs.provider)
        supervisor.fabric.own_pool = remembered_pool(configuration.agent.state)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            await supervisor.all_tried(FIRST_TRY_SECONDS)
            yield supervisor
            nursery.cancel_scope.cancel()


def say_what_is_away(fabric: Fabric) -> None:
    """A line in the log, where namespaces of the pool are not reached."""
    away = sum(route is None for route in fabric.routes)
    if away:
        log.warning(
            "%d of the pool's %d namespaces cannot be reached: their values are misses until they can",
            away,
            len(fabric.routes),
        )
