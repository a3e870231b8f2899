"""Whether what a verb would overwrite is served by an agent of this machine."""

from __future__ import annotations

from collections.abc import Iterable

from agent.errors import UserError
from agent.host_os.presence import serving_processes
from agent.pool.map.inspect import Inspection


def refuse_served(inspections: Iterable[Inspection]) -> None:
    """Raises UserError where a pool that lies there is served by an agent of this machine.

    That would go on writing into what is another pool's by then, until it finds out
    (agent/attach/map_watch.py). An agent elsewhere cannot be seen from here.
    """
    pools = {each.superblock.pool_map.pool_id for each in inspections if each.superblock is not None}
    processes = serving_processes(pools)
    if processes:
        raise UserError(
            f"the pool there is being served, by process {', '.join(map(str, processes))}; "
            "it was not touched",
            "end the agent first: g35 unmount, or g35 down",
        )
