"""Debian's signed 6.12 kernel: found by apt, downloaded once, kept as its package file.

The cached version goes first, so that the lab works without a network and gives the same result tomorrow.
Without one, or with `refresh`, it is the version of apt's meta package. apt checks the file against the
signed archive.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from emulator.lab.cache import publish_folder
from emulator.lab.errors import LabUnavailableError, last_lines

# The plain flavour: the cloud one lacks the RDMA drivers. 6.12 and not Debian 12's own 6.1, which was built
# without NVMe authentication and TLS.
META_PACKAGE = "linux-image-6.12-amd64"
PACKAGE_NAME = re.compile(r"linux-image-6\.12\.\d+\+deb\d+-amd64")
APT_TIMEOUT_S = 600

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KernelPackage:
    """A downloaded kernel: `release` as `uname -r` will say it, `file` the .deb."""

    release: str
    file: Path


def require_programs(packages_of: dict[str, str]) -> None:
    """Raise LabUnavailableError unless all these programs (name -> its Debian package) are installed."""
    missing = {program: package for program, package in packages_of.items() if shutil.which(program) is None}
    if missing:
        raise LabUnavailableError(
            f"{', '.join(sorted(missing))} not found; "
            f"install with: apt-get install {' '.join(sorted(set(missing.values())))}"
        )


def kernel_package(cache: Path, progress: Progress, *, refresh: bool = False) -> KernelPackage:
    """The kernel to boot; downloads it if need be. Raises LabUnavailableError."""
    folder = cache / "kernels"
    if not refresh:
        cached = sorted(folder.glob("linux-image-*/*.deb"), key=lambda file: file.stat().st_mtime)
        if cached:
            return _as_kernel(cached[-1])
    require_programs({"apt-get": "apt", "apt-cache": "apt"})
    name = _newest_package(progress)

    def download(into: Path) -> None:
        _download(name, into, progress)

    version = _field_of(name, "Version")
    published = publish_folder(folder / f"{name}_{version.replace(':', '%3a')}", download)
    return _as_kernel(next(published.glob("*.deb")))


def _as_kernel(file: Path) -> KernelPackage:
    return KernelPackage(release=file.name.split("_")[0].removeprefix("linux-image-"), file=file)


def _newest_package(progress: Progress) -> str:
    """The kernel of the meta package, after an `apt-get update` where the lists have none."""
    for attempt in ("as it is", "updated"):
        depends = _run(["apt-cache", "depends", META_PACKAGE]).stdout
        found = PACKAGE_NAME.search(depends)
        if found:
            return found.group()
        if attempt == "as it is" and os.geteuid() == 0:
            progress("refreshing apt's package lists")
            _run(["apt-get", "update"])
        elif attempt == "as it is":
            break
    raise LabUnavailableError(
        f"apt knows no {META_PACKAGE} (it is in Debian 12's security archive); try: apt-get update"
    )


def _field_of(package: str, field: str) -> str:
    for line in _run(["apt-cache", "show", "--no-all-versions", package]).stdout.splitlines():
        key, _, value = line.partition(": ")
        if key == field:
            return value.strip()
    raise LabUnavailableError(f"apt knows no {field} of {package}; try: apt-get update")


def _download(package: str, into: Path, progress: Progress) -> None:
    """`apt-get download`, with progress."""
    size = int(_field_of(package, "Size"))
    # The user that apt would switch to for downloads cannot write to a folder of ours.
    command = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", package]
    deadline = time.monotonic() + APT_TIMEOUT_S
    with subprocess.Popen(
        command, cwd=into, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as apt:
        try:
            while True:
                arrived = sum(file.stat().st_size for file in into.iterdir())
                progress(f"downloading {package}: {arrived // 1_000_000} of {size // 1_000_000} MB")
                try:
                    said = apt.communicate(timeout=0.5)[0]
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() > deadline:
                        raise LabUnavailableError(f"{package} not downloaded in {APT_TIMEOUT_S} s") from None
        finally:
            apt.kill()
    if apt.returncode != 0 or len(list(into.glob("*.deb"))) != 1:
        raise LabUnavailableError(f"{package} cannot be downloaded: {last_lines(said, 4)}")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run an apt command for its output, which is empty after a failure."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=APT_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise LabUnavailableError(f"{' '.join(command)} did not end in {APT_TIMEOUT_S} s") from None
