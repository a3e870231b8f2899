"""What tests need of the machine: why it is missing and how to have it, as a reason and as a mark."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from pathlib import Path

import pytest

CAP_SYS_ADMIN = 21
"""linux/capability.h."""
IN_A_CONTAINER = "a container needs --device /dev/fuse --cap-add SYS_ADMIN"
NO_RAW_SOCKETS = "raw sockets need CAP_NET_RAW: run as root, or --cap-add NET_RAW"
NO_NETWORK = (
    "no network namespace can be made here: run as root, in a container with --cap-add SYS_ADMIN, "
    "or allow user namespaces for all"
)


def has_capability(number: int) -> bool:
    """Whether this process has a capability in effect."""
    words = Path("/proc/self/status").read_text().split()
    return bool(int(words[words.index("CapEff:") + 1], 16) >> number & 1)


def why_no_mount() -> str | None:
    """Why this process can mount no FUSE file system; None where it can."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/fuse cannot be opened ({error.strerror}), so nothing can be mounted: {IN_A_CONTAINER}"
    if os.geteuid() == 0 and not has_capability(CAP_SYS_ADMIN):
        return f"root without CAP_SYS_ADMIN can mount nothing: {IN_A_CONTAINER}"
    if os.geteuid() and shutil.which("fusermount3") is None:
        return "not root, and no fusermount3, so nothing can be mounted: make setup installs fuse3"
    return None


def why_no_mount_as_root() -> str | None:
    """Why this process can mount no FUSE file system without fusermount3; None where it can."""
    return why_no_mount() or ("not root: run as root, which mounts by itself" if os.geteuid() else None)


def why_not_root() -> str | None:
    """Why this process may neither become another user nor give files away; None where it may."""
    return "not root: run as root, who may become another user and give files away" if os.geteuid() else None


def why_no_admin() -> str | None:
    """Why this process may neither mount a tmpfs nor force an unmount; None where it may."""
    if has_capability(CAP_SYS_ADMIN):
        return None
    return "mount(2) needs CAP_SYS_ADMIN: run as root, in a container with --cap-add SYS_ADMIN"


def why_no_ipv6() -> str | None:
    """Why nothing can be bound to ::1; None where it can."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.bind(("::1", 0))
        return None
    return "no IPv6 loopback, ::1: sysctl net.ipv6.conf.all.disable_ipv6=0 net.ipv6.conf.lo.disable_ipv6=0"


def why_no_program(name: str, package: str) -> str | None:
    """Why a program of a Debian package cannot be run; None where it can."""
    return None if shutil.which(name) else f"no {name} on this machine: apt-get install {package}"


def needs(why_not: str | None) -> pytest.MarkDecorator:
    """The mark that skips where there is a reason why not."""
    return pytest.mark.skipif(why_not is not None, reason=str(why_not))


needs_mount = needs(why_no_mount())
needs_mount_as_root = needs(why_no_mount_as_root())
needs_root = needs(why_not_root())
needs_admin = needs(why_no_admin())
needs_ipv6 = needs(why_no_ipv6())
needs_tshark = needs(why_no_program("tshark", "tshark"))
