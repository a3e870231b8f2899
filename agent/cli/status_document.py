"""The status that an agent gives at its mount."""

import errno
import json
from pathlib import Path
from typing import Any

from agent.errors import G35Error
from agent.fs.doors.mounting import dead_mount_advice
from agent.host_os.hung_agent import LOOK_SECONDS, asked


class DeadMount(G35Error):
    """A mount whose agent has ended without unmounting it."""


def read_status(mount: Path) -> dict[str, Any]:
    """The agent's snapshot, read through its mount. Raises G35Error where nobody answers there."""
    try:
        text = asked(mount, (mount / ".g35/status.json").read_text, LOOK_SECONDS)
        found = json.loads(text)
        if not isinstance(found, dict) or "pid" not in found:
            raise ValueError("not a status")
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOTCONN:
            raise DeadMount(f"{mount} is dead: its agent has ended", dead_mount_advice([mount])) from None
        why = error.strerror if isinstance(error, OSError) else "it has no status of an agent"
        raise G35Error(
            f"no agent answers at {mount}: {why}", "is it a g35 mount, and is its agent up?"
        ) from None
    return found
