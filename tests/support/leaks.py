"""What a test must not leave behind: mounts, sockets, threads and processes."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

IDLE_TRIO_THREAD = re.compile(r"Trio thread \d+")
"""A thread that trio keeps for 10 s after its last job. While it has a job, it bears the job's name."""


def mounts_below(folder: Path) -> list[Path]:
    """Mount points at or below `folder`, deepest first."""
    top = str(folder.resolve())
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place = line.split(" ")[4].replace("\\040", " ")
        if place == top or place.startswith(top + "/"):
            found.append(Path(place))
    return sorted(found, key=lambda place: len(place.parts), reverse=True)


def unmount_below(folder: Path) -> list[Path]:
    """Lazily unmount what is mounted below `folder` and say what there was."""
    found = mounts_below(folder)
    for place in found:
        for program in (["fusermount3", "-uz", str(place)], ["umount", "-l", str(place)]):
            try:
                if subprocess.run(program, capture_output=True, timeout=20, check=False).returncode == 0:
                    break
            except (OSError, subprocess.TimeoutExpired):
                continue
    return found


@dataclass(frozen=True, slots=True)
class Holdings:
    """What this process holds at one moment, for comparing with a later one."""

    sockets: frozenset[str]
    threads: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        sockets = set()
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{descriptor}")
            except OSError:
                continue
            if target.startswith("socket:") or target == "/dev/fuse":
                sockets.add(f"descriptor {descriptor} → {target}")
        threads = {
            f"thread {thread.name} ({thread.ident})"
            for thread in threading.enumerate()
            if thread.is_alive() and not IDLE_TRIO_THREAD.fullmatch(thread.name)
        }
        return cls(frozenset(sockets), frozenset(threads))

    def left_over(self, before: Holdings) -> list[str]:
        """What is here now and was not before."""
        return sorted((self.sockets - before.sockets) | (self.threads - before.threads))
