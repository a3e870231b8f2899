"""What becomes of a profile: a record for programs, a table for people."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from agent.bench.processor_profile import COLUMNS, Profile, Share
from agent.cli.tables import folding_table
from agent.host_os.whole_file import write_whole

HEADS = ("threads", "lock", "cipher", "kernel", "processor", "queue", "waiting")


def records(profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """The list that `--json` writes; all times are microseconds a value."""
    return [
        {
            "name": profile.entry.name,
            "value_bytes": profile.entry.value_bytes,
            "values": profile.values,
            "seconds": round(profile.seconds, 4),
            "processor_us": round(profile.processor, 3),
            "processes": [
                _record("process", whole) | {"kinds": [_record("kind", part) for part in parts]}
                for whole, parts in profile.processes
            ],
        }
        for profile in profiles
    ]


def _record(what: str, share: Share) -> dict[str, Any]:
    numbers = {f"{column}_us": round(getattr(share, column), 3) for column in (*COLUMNS, "processor")}
    return {what: share.name, "threads": share.threads, **numbers}


def write(path: Path, profiles: Sequence[Profile]) -> None:
    write_whole(path, json.dumps(records(profiles), indent=1) + "\n")


def table(profile: Profile) -> Table:
    """A row for each process, and below it one for each kind of its threads, where there are several."""
    entry = profile.entry
    title = f"{entry.name}: {profile.processor:,.1f} us of processor a value, {profile.values:,} values"
    made = folding_table(title, ("us a value",), HEADS)
    for whole, parts in profile.processes:
        made.add_row(whole.name, *_cells(whole))
        for part in parts if len(parts) > 1 else ():
            made.add_row(f"- {part.name}", *_cells(part))
    return made


def _cells(share: Share) -> list[str]:
    times = (share.lock, share.cipher, share.kernel, share.processor, share.queue, share.waiting)
    return [str(share.threads), *(f"{each:,.1f}" for each in times)]
