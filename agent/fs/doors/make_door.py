"""Makes the door that the configuration names."""

from pathlib import Path
from typing import Literal, TypeAlias

from agent.fs.after_reply import AfterReply
from agent.fs.doors.door import Door, MakeRunner
from agent.fs.doors.mounting import MountOptions
from agent.fs.doors.parked_requests import ParkedRequests
from agent.fs.interface import Tree
from agent.host_os.workers_on_duty import Roster

DoorKind: TypeAlias = Literal["dev_fuse", "pyfuse3"]


def make_door(
    kind: DoorKind,
    tree: Tree,
    mountpoint: Path,
    worker_count: int,
    make_runner: MakeRunner,
    options: MountOptions | None = None,
    after_reply: AfterReply | None = None,
    parked: ParkedRequests | None = None,
    roster: Roster | None = None,
) -> Door:
    """`after_reply`: where a face puts work off; `parked`: where steps may give way; `roster`: who of the
    workers rests. The door by pyfuse3 answers when all is done, has its workers wait, and lets none rest."""
    # Imported here: pyfuse3 brings libfuse and trio along, which the hot door does without.
    if kind == "pyfuse3":
        from agent.fs.doors.pyfuse3_door import Pyfuse3Door

        return Pyfuse3Door(tree, mountpoint, worker_count, make_runner, options)
    from agent.fs.doors.dev_fuse import DevFuseDoor
    from agent.fs.fuse.session import FuseSession

    session = FuseSession(tree)
    return DevFuseDoor(session, mountpoint, worker_count, make_runner, options, after_reply, parked, roster)
