"""Root file systems of Debian for tests, of this machine's architecture or another, and commands in them.

`make_root` has mmdebstrap lay one out, from the mirrors that this machine's own apt uses. A command runs in
it in a mount name space of its own, so that nothing stays mounted however it ends. For another architecture
qemu's user mode emulation runs the programs; it is registered (binfmt_misc) in a user name space that ends
with the command, which Linux can do since 6.7, so that nothing of the machine is changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SUITE = "bookworm"
"""Debian 12, the oldest that g35 runs on."""
EMULATOR = Path("/usr/bin/qemu-aarch64-static")
_REGISTRATION = (
    ":g35-aarch64:M::"
    # ELF, 64 bit, little-endian, version 1; type executable or shared object; machine 183, AArch64.
    r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:"
    r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:"
    # F: opened now, so that it is found from within the other root.
    f"{EMULATOR}:F"
)
_ENTER = """
root=$1 registration=$2; shift 2
if [ -n "$registration" ] && [ ! -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]; then
    mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
    printf '%s' "$registration" >/proc/sys/fs/binfmt_misc/register
fi
for folder in proc sys dev; do mount --rbind /$folder "$root/$folder"; done
mount -t tmpfs none "$root/tmp"
while [ "$1" != -- ]; do
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    mount -o remount,bind,ro "$root$2"
    shift 2
done
shift
exec chroot "$@"
"""


class Unavailable(Exception):
    """This machine cannot do it; the text says what is missing."""


def require(*programs: tuple[str, str]) -> None:
    """Raise Unavailable unless we are root and have each (program, package)."""
    if os.geteuid() != 0:
        raise Unavailable("root is needed, for mounts and device nodes of another root file system")
    missing = sorted({package for program, package in programs if shutil.which(program) is None})
    if missing:
        raise Unavailable(f"missing programs; apt-get install -y --no-install-recommends {' '.join(missing)}")


def mirrors() -> list[str]:
    """Lines for apt's sources: Debian's mirrors as this machine knows them, for `SUITE`."""
    try:
        listed = subprocess.run(
            [
                "apt-get", "indextargets", "--format", "$(SITE) $(RELEASE) $(ORIGIN)",
                "Created-By: Packages", "Component: main",
            ],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"apt does not say where Debian's packages are: {error}") from None
    rows = {tuple(line.split()) for line in listed.splitlines()}
    found = [
        f"deb {site} {release} main"
        for site, release, origin in sorted(row for row in rows if len(row) == 3)
        if origin == "Debian" and release.startswith(SUITE)
    ]
    if not found:
        raise Unavailable(f"apt knows no mirror of Debian {SUITE}; apt-get update may help")
    return found


def make_root(root: Path, packages: Sequence[str], *, architecture: str = "", extract: bool = False) -> None:
    """Lay out a root file system; `extract`: unpack only, running none of the packages' scripts."""
    variant = "extract" if extract else "minbase"
    command = ["mmdebstrap", "--quiet", f"--variant={variant}", f"--include={','.join(packages)}"]
    if architecture:
        command.append(f"--architectures={architecture}")
    done = subprocess.run(
        [*command, SUITE, str(root), *mirrors()], capture_output=True, text=True, check=False, timeout=900
    )
    if done.returncode != 0:
        shutil.rmtree(root, ignore_errors=True)
        raise Unavailable(f"mmdebstrap failed: {done.stderr.strip()[-600:]}")


def command_in(
    root: Path,
    command: Sequence[str],
    *,
    binds: Mapping[Path, str] | None = None,
    user: str = "",
    environment: Mapping[str, str] | None = None,
    emulated: bool = False,
) -> list[str]:
    """The words that run `command` in `root`, with an environment of its own and `binds` (folder here, place
    there) read-only. What it mounts or registers ends with it."""
    words = ["unshare", "--mount", "--propagation", "private"]
    if emulated:
        words += ["--user", "--map-root-user"]
    words += ["sh", "-ec", _ENTER, "sh", str(root), _REGISTRATION if emulated else ""]
    for here, there in (binds or {}).items():
        words += [str(here), there]
    words += ["--", *([f"--userspec={user}"] if user else []), str(root), "/usr/bin/env", "-i"]
    settings = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        **(environment or {}),
    }
    return [*words, *(f"{name}={value}" for name, value in settings.items()), *command]
