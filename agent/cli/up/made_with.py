"""What the pool in a state folder was made with: a later `g35 up` goes on with it, or names what differs.

The drives' number and size are read from their folders, the rest from `made_with.json`. Drives in memory are
new at each start.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agent.cli.up.layout import Layout
from agent.errors import G35Error, UserError
from agent.host_os.whole_file import write_whole
from agent.sizes import parse_size, typed_size

_SIZES = ("drive_size", "value_size", "chunk_size")
_COUNTS = ("enclosures", "drives")
"""Another number of drives is no mistake: those that are new wait for `g35 pool add`."""


@dataclass(frozen=True, slots=True)
class Formatted:
    """What a format fixes; the names are those of the options of `g35 up`."""

    value_size: str
    suite: str
    files: bool
    chunk_size: str = "1M"
    """As pools of earlier versions have it."""

    def write(self, layout: Layout) -> None:
        """Note it in the state folder, whole or not at all."""
        write_whole(layout.made_with, json.dumps(asdict(self)) + "\n")


def check_media(layout: Layout, media: str) -> None:
    """Refuse drives in memory where the pool lies in files: it would be hidden behind an empty one."""
    if media == "memory" and layout.has_drives():
        raise _was_made_with(layout, "--media files", "--media memory")


def options_of_before(
    layout: Layout, asked: Mapping[str, Any], given: Callable[[str], bool]
) -> dict[str, Any]:
    """The options of `asked`, with the state folder's own where the user has given none.

    `given`: whether the user typed that option. Raises UserError for one that differs and cannot be changed.
    """
    found = dict(asked)
    for name, before in _before(layout).items():
        if not given(name):
            found[name] = before
        elif name not in _COUNTS and not _same(name, before, asked[name]):
            raise _was_made_with(layout, _typed(name, before), _typed(name, asked[name]))
    return found


def _was_made_with(layout: Layout, before: str, asked: str) -> UserError:
    return UserError(
        f"the pool in {layout.state} was made with {before}, not with {asked}",
        f"leave {asked} out, or make another pool with another --state",
    )


def _before(layout: Layout) -> dict[str, Any]:
    """What is known of the drives and the pool that lie in the folder; empty where none do."""
    if not layout.has_drives():
        return {}
    before = _drives(layout)
    try:
        before |= asdict(Formatted(**json.loads(layout.made_with.read_text())))
    except FileNotFoundError:
        pass  # a pool of an earlier version, or one that was not formatted yet
    except (OSError, ValueError, TypeError):
        raise G35Error(
            f"{layout.made_with} is damaged", "remove it, and give the options that the pool was made with"
        ) from None
    return before


def _drives(layout: Layout) -> dict[str, Any]:
    """Enclosures, drives of each and their size, of what the enclosures wrote beside their drives."""
    folders = sorted(layout.state.glob("drives-*"))
    records = [sorted(folder.glob("drive-*.json")) for folder in folders]
    try:
        sizes = [int(json.loads(path.read_text())["size"]) for paths in records for path in paths]
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # the enclosure says what is wrong with it
    if not sizes:
        return {}
    return {
        "enclosures": len(folders),
        "drives": max(len(paths) for paths in records),
        "drive_size": typed_size(sizes[0]),
    }


def _same(name: str, before: Any, asked: Any) -> bool:
    return bool(parse_size(before) == parse_size(asked)) if name in _SIZES else bool(before == asked)


def _typed(name: str, value: Any) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {value}"
