"""Names of files whose pool is gone: `g35 up` sets them aside where it makes a new pool on new drives.

The agent serves no names of another pool (agent/fs/files/metadata_pool.py), because its drives may come back.
Drives in memory never do, and /fs would be missing until somebody removed the file by hand.
"""

from collections.abc import Iterator
from pathlib import Path

from agent.cli.up.layout import Layout
from agent.fs.files.metadata_pool import names_another, noted_home

_NO_POOL = ""


def set_aside(layout: Layout) -> Iterator[tuple[Path, Path]]:
    """Rename each metadata file that names files of a pool, and what belongs to it: where it was, and is now.

    Nothing is deleted: should the drives come back, the operator renames the files back.
    """
    for names in sorted(layout.agent_state.glob("*files.sqlite")):
        if not names_another(names, _NO_POOL):
            continue
        ending = f".of-{noted_home(names).pool_id}"
        parts = [names]
        if names.name != "files.sqlite":  # of a tenant of S3, which has an index of its objects beside it
            parts.append(names.with_name(names.name.replace(".files.sqlite", ".sqlite")))
        for part in parts:
            for log in ("", "-wal", "-shm"):  # SQLite finds them by the name of the database
                path = part.with_name(part.name + log)
                if path.exists():
                    yield path, path.rename(part.with_name(part.name + ending + log))
