"""The lab's cache of downloads and builds.

A cached folder is made under another name and renamed into place when it is complete. Its name contains a
digest of its ingredients. So a folder under its name is whole and current. One lock keeps two preparations
from doing the same work.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def cache_folder() -> Path:
    """`$G35_CACHE/lab`, or `.cache/lab` in the repository; made if it is not there."""
    base = os.environ.get("G35_CACHE")
    folder = (Path(base).expanduser().absolute() if base else REPOSITORY / ".cache") / "lab"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def only_one_preparation(cache: Path) -> Iterator[None]:
    """Hold the cache's lock; waits for another process that is preparing."""
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def digest_of(*parts: bytes) -> str:
    """A short name for a combination of ingredients."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()[:16]


def publish_folder(destination: Path, fill: Callable[[Path], None]) -> Path:
    """`destination`, made by `fill(folder)` if it does not exist; on any failure it stays absent.

    Removes leftovers of interrupted attempts. Call it under `only_one_preparation`.
    """
    if destination.is_dir():
        return destination
    destination.parent.mkdir(parents=True, exist_ok=True)
    for left_over in destination.parent.glob("unfinished-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=destination.parent))
    try:
        fill(unfinished)
        os.sync()  # otherwise a power cut may keep the rename and lose the contents
        unfinished.rename(destination)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return destination
