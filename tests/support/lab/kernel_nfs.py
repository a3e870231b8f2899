"""The kernel's NFS server and its client in one guest, by loopback: no program of nfs-utils is needed.

A server asks user space which clients and folders it may serve, by caches that anybody may fill before
(`net/sunrpc/cache.c`). The client takes its options by mount(2), as mount.nfs hands them on.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL = Path("/proc/fs/nfsd")
CACHES = Path("/proc/net/rpc")
MODULES = Path("/run/modules")
FLAGS = 0x2 | 0x10 | 0x400 | 0x2000
"""NFSEXP_INSECURE_PORT, _ASYNC, _NOSUBTREECHECK and _FSID (include/uapi/linux/nfsd/export.h)."""
NEVER = 0x7FFFFFFF
LEASE_SECONDS = 10
"""The shortest there is. After its start a server lets nobody open a file for as long."""
MNT_FORCE, MNT_DETACH = 1, 2


def insert_modules() -> None:
    """What the lab does not insert at boot; once is enough."""
    if CONTROL.parent.joinpath("nfsd").exists() and "nfs4" in Path("/proc/filesystems").read_text():
        return
    for name in (MODULES / "later").read_text().split():
        subprocess.run(["insmod", str(MODULES / name)], check=True, timeout=120)


class KernelNfs:
    """A folder of this guest, served and mounted again."""

    def __init__(self, folder: Path) -> None:
        """`folder` lies on a file system that the kernel can export, such as tmpfs."""
        self.folder = folder
        insert_modules()
        if not (CONTROL / "threads").exists():
            subprocess.run(["mount", "-t", "nfsd", "nfsd", str(CONTROL)], check=True, timeout=60)
        self.start()

    def start(self) -> None:
        """Serve. What the caches had went with the last thread."""
        _write(CONTROL / "versions", "-3 +4 +4.2")
        for what in ("nfsv4leasetime", "nfsv4gracetime"):
            _write(CONTROL / what, str(LEASE_SECONDS))
        _write(CACHES / "auth.unix.ip/channel", f"nfsd 127.0.0.1 {NEVER} guest")
        export = f"guest {self.folder} {NEVER} {FLAGS} 65534 65534 0"
        _write(CACHES / "nfsd.export/channel", export)
        _write(CACHES / "nfsd.fh/channel", f"guest 1 \\x00000000 {NEVER} {self.folder}")
        _write(CONTROL / "portlist", "tcp 2049")
        _write(CONTROL / "threads", "2")

    def stop(self) -> None:
        """As a server that is gone: its port is closed."""
        _write(CONTROL / "threads", "0")

    @contextmanager
    def mounted(self, at: Path, options: str) -> Iterator[Path]:
        """The client's mount, for as long as the block runs. `options`: such as `hard`."""
        at.mkdir(exist_ok=True)
        words = f"vers=4.2,addr=127.0.0.1,clientaddr=127.0.0.1,proto=tcp,port=2049,sec=sys,{options}"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"127.0.0.1:/", os.fsencode(at), b"nfs4", 0, words.encode()):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(at))
        try:
            yield at
        finally:
            with suppress(OSError):
                self.start()
            libc.umount2(os.fsencode(at), MNT_FORCE | MNT_DETACH)
            self.stop()


def _write(file: Path, text: str) -> None:
    """In one write(2), which is a message to the kernel: a line."""
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, (text + "\n").encode())
    finally:
        os.close(descriptor)
