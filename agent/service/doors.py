"""Every door of the configuration, made for one agent."""

from __future__ import annotations

from agent.fs.doors.make_door import make_door
from agent.fs.doors.mounting import MountOptions, clear_dead_mount, refuse_to_cover
from agent.fs.files.options import FilesOptions
from agent.remote.channel import current_lanes
from agent.s3.opening import make_s3_door
from agent.service.agent import MOUNT_DOOR, S3_DOOR, Agent, Doors
from agent.service.guest_doors import make_guest_doors


def make_doors(agent: Agent) -> Doors:
    """Every door of the configuration, none of them open yet."""
    settings, lanes = agent.configuration.agent, agent.lanes
    tree = agent.file_system()
    doors: Doors = []
    if settings.mount is not None:
        clear_dead_mount(settings.mount)
        settings.mount.mkdir(parents=True, exist_ok=True)
        refuse_to_cover(settings.mount)
        door = make_door(
            "dev_fuse" if settings.door == "fuse" else "pyfuse3",
            tree,
            settings.mount,
            settings.workers,
            lambda number: lanes.take(agent.queues.workers[number]),
            MountOptions(allow_other=settings.allow_other or None),
        )
        doors.append((MOUNT_DOOR, door))
    guests = make_guest_doors(
        agent, agent.configuration.virtiofs, agent.queues.guests, lanes.take, settings.state
    )
    doors += [(f"virtiofs-{number}", door) for number, door in enumerate(guests)]
    s3 = agent.configuration.s3
    if s3.listen:
        options = FilesOptions(s3.staging, on_full=agent.configuration.files.on_full, workers=s3.workers)
        erased = {each.name for each in agent.watch.pool_map.tenants if each.is_erased}
        made = make_s3_door(
            s3,
            agent.volumes,
            settings.state,
            options,
            current_lanes,
            lambda number: lanes.take(agent.queues.s3[number]),
            erased,
            agent.sources.pool_id,
            agent.sources.not_served,
            agent.bounds,
        )
        doors.append((S3_DOOR, made))
    return doors
