"""rdma-core's own tests of pyverbs, fetched once and kept: facts to be judged by, never a part of this tree.

The nearest release that pip offers is 57 (Debian has 44). Its tests use a few names that came after 44; the
program beside this file (`rdma_core_program.py`) gives them those.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

from emulator.lab.cache import cache_folder, only_one_preparation, publish_folder

RELEASE = "pyverbs==57.0"
DIGEST = "6d3a452bf14b8c56dec9281d64101573a7574bc879471bf0d3521168755ca9fe"
ARCHIVE = "pyverbs-57.0.tar.gz"
INSIDE = "pyverbs-57.0/rdma-core/tests/"
FETCH_SECONDS = 60


class CannotFetch(Exception):
    """The world's fault: pip does not give it. The message says why."""


def tests_folder() -> Path:
    """The folder with `test_*.py`, fetched where it is not in the cache. Raises `CannotFetch`."""
    cache = cache_folder()
    with only_one_preparation(cache):
        return publish_folder(cache / f"rdma-core-{DIGEST[:16]}", _fill)


def _fill(folder: Path) -> None:
    try:
        subprocess.run(
            [
                sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
                "--no-binary", ":all:", "-d", str(folder), RELEASE,
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=FETCH_SECONDS,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise CannotFetch((error.stderr or "pip failed").strip().splitlines()[-1]) from error
    except subprocess.TimeoutExpired as error:
        raise CannotFetch(f"pip took more than {FETCH_SECONDS} s") from error
    archive = folder / ARCHIVE
    if not archive.exists():
        raise CannotFetch(f"pip did not leave {ARCHIVE}")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != DIGEST:
        raise CannotFetch(f"{ARCHIVE} has digest {found}, not {DIGEST}")
    with tarfile.open(archive) as contents:
        for member in contents.getmembers():
            name = member.name.removeprefix(INSIDE)
            if (
                member.isfile()
                and member.name.startswith(INSIDE)
                and "/" not in name
                and name.endswith(".py")
            ):
                data = contents.extractfile(member)
                if data is not None:
                    (folder / name).write_bytes(data.read())
    archive.unlink()
