"""The files of the checkout, for the tests that judge the tree itself."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("agent", "emulator", "host_shim", "nvmeof")


def tracked_files(repository: Path) -> list[Path]:
    """Every file that belongs to the repository: committed, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=repository,
        capture_output=True,
        check=True,
        timeout=60,
    )
    names = sorted(set(listed.stdout.decode().split("\0")) - {""})
    return [repository / name for name in names if (repository / name).is_file()]


def text_files(repository: Path) -> Iterator[tuple[str, str]]:
    """(path from the root, text) of every file that is text."""
    for path in tracked_files(repository):
        try:
            yield str(path.relative_to(repository)), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
