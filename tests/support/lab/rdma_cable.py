"""A cable in the lab's guest: rxe, the kernel's soft-RoCE, at one end, a network namespace at the other.

rxe receives in the initial network namespace alone, so that is the kernel's side; an emulated NIC lives in
the namespace at the far end. Its program need not: `inside` takes the calling thread there for a moment, and
a socket stays where it was made.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator
from typing import Final

from emulator.roce.runtime.device import Device
from emulator.roce.runtime.registry import add_device, open_device, release_device, remove_device
from nvmeof.transport.verbs_provider import VerbsUnavailable, load_verbs
from tests.support.lab.kernel_host import run

KERNEL: Final = "10.77.0.1"
OURS: Final = "10.77.0.2"
OURS_TOO: Final = "10.77.0.3"
RXE: Final = "rxe0"
NAMESPACE: Final = "b"
PROGRAMS: Final = {"ip": "iproute2", "rdma": "iproute2", "rping": "rdmacm-utils"}

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Cable:
    """veth0 here, with rxe0 on it; veth1 in the namespace. It stays: to take an rxe device away from somebody
    who uses it blocks for good (`unregister_netdevice`), and the guest ends anyway.
    """

    def __init__(self) -> None:
        run("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
        run("ip", "netns", "add", NAMESPACE)
        run("ip", "link", "set", "veth1", "netns", NAMESPACE)
        run("ip", "address", "add", f"{KERNEL}/24", "dev", "veth0")
        run("ip", "link", "set", "veth0", "up")
        for address in (OURS, OURS_TOO):
            run("ip", "-n", NAMESPACE, "address", "add", f"{address}/24", "dev", "veth1")
        for name in ("veth1", "lo"):
            run("ip", "-n", NAMESPACE, "link", "set", name, "up")
        run("rdma", "link", "add", RXE, "type", "rxe", "netdev", "veth0")

    @staticmethod
    def set_mtu(mtu: int = 1500) -> None:
        """Of both interfaces: 1500 gives a RoCE MTU of 1024, 4200 one of 4096."""
        run("ip", "link", "set", "veth0", "mtu", str(mtu))
        run("ip", "-n", NAMESPACE, "link", "set", "veth1", "mtu", str(mtu))

    @staticmethod
    @contextlib.contextmanager
    def weather(*how: str) -> Iterator[None]:
        """Loss and the like in both directions: words of `tc qdisc ... netem`."""
        ends = (("tc", "veth0"), ("tc", "-n", NAMESPACE, "veth1"))
        for *tc, name in ends:
            run(*tc, "qdisc", "add", "dev", name, "root", "netem", *how)
        try:
            yield
        finally:
            for *tc, name in ends:
                run(*tc, "qdisc", "delete", "dev", name, "root")


def why_there_is_no_cable() -> str | None:
    """What keeps the lab from talking RDMA, in a sentence; None where nothing does."""
    lacking = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if lacking:
        return f"Debian packages are missing: {' '.join(lacking)}"
    try:
        load_verbs("pyverbs")
    except VerbsUnavailable as error:
        return f"Debian's python3-pyverbs: {error}"
    return None


@contextlib.contextmanager
def inside(namespace: str = NAMESPACE) -> Iterator[None]:
    """In the namespace, for the calling thread and for what it opens or starts."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter(here)
    finally:
        os.close(here)


@contextlib.contextmanager
def far_device(*, check_icrc_in_full: bool = False) -> Iterator[Device]:
    """The emulated NIC at the far end, open in this process: whoever asks for `OURS` shares it."""
    add_device("far", OURS, check_icrc_in_full=check_icrc_in_full)
    with inside():
        device = open_device(OURS)
    try:
        yield device
    finally:
        release_device(device)
        remove_device("far")


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
