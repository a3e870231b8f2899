"""rdma-core's own tests of pyverbs, fetched once and kept: facts to be judged by, never a part of this tree.

The nearest release that pip offers is 57 (Debian has 44). Its tests use a few names that came after 44; the
program beside this file (`rdma_core_program.py`) gives them those.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

from emulator.lab.cache import cache_folder, only_one_preparation, publish_folder

RELEASE = "pyverbs==57.0"
DIGEST = "6d3a452bf14b8c56dec9281d64101573a7574bc879471bf0d3521168755ca9fe"
ARCHIVE = "pyverbs-57.0.tar.gz"
INSIDE = "pyverbs-57.0/rdma-core/tests/"
FETCH_SECONDS = 20


class CannotFetch(Exception):
    """The world's fault: pip does not give it. The message says why."""


def tests_folder() -> Path:
    """The folder with `test_*.py`, fetched where it is not in the cache. Raises `CannotFetch`;
    ValueError where another archive came than the one that was judged."""
    cache = cache_folder()
    with only_one_preparation(cache):
        return publish_folder(cache / f"rdma-core-{DIGEST[:16]}", _fill)


def _download(folder: Path) -> None:
    """pip lets a source release describe itself, by build tools of its own; hence the process group."""
    pip = subprocess.Popen(
        [
            sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
            "--retries", "0", "--timeout", "5",
            "--no-binary", "pyverbs", "-d", str(folder), RELEASE,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said = pip.communicate(timeout=FETCH_SECONDS)[1]
    except subprocess.TimeoutExpired as error:
        os.killpg(pip.pid, signal.SIGKILL)
        pip.communicate()
        raise CannotFetch(f"pip took more than {FETCH_SECONDS} s") from error
    if pip.returncode:
        raise CannotFetch((said or "pip failed").strip().splitlines()[-1])


def _fill(folder: Path) -> None:
    _download(folder)
    archive = folder / ARCHIVE
    if not archive.exists():
        raise CannotFetch(f"pip did not leave {ARCHIVE}")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != DIGEST:
        raise ValueError(f"{ARCHIVE} has digest {found}, not {DIGEST}")
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
