"""Another store's servers and its client, on the bench's behalf: `python -m ... PEER PYTHON FOLDER`.

The client talks to the bench by this process's standard input and output; when it ends, so do the servers.
PYTHON is the interpreter that has the store's client, FOLDER an empty folder.

Mooncake listens on all addresses and authenticates nobody, so it gets a network namespace with a loopback
alone.
"""

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from agent.bench.redis_site import ADDRESS, NotHere, free_ports, listens
from agent.cli.up.children import run_child
from agent.errors import G35Error
from agent.host_os.parent_death import die_with_parent

PROVIDER_BYTES = 1 << 30
"""What the values of all sizes need is a third of it; Mooncake evicts above nine tenths."""

CLONE_NEWNET = 0x40000000
CLONE_NEWUSER = 0x10000000
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
IFF_UP = 1
_IFREQ = struct.Struct("16sh22x")
"""`struct ifreq` with flags: the interface's name, the flags, and what other requests need."""

Clients = Callable[[str, Path, ExitStack], Sequence[str]]
"""Starts a store's servers on an exit stack; the client's command."""


def lm(python: str, folder: Path, stack: ExitStack) -> Sequence[str]:
    """LMCache's lm:// server, keeping values in its memory, as it does by default."""
    (port,) = free_ports(1)
    command = [python, "-P", "-m", "lmcache.v1.server", ADDRESS, str(port)]
    run_child(stack, "the lm:// server", command, folder / "server", lambda: listens(port))
    return [python, "-P", "-m", "agent.bench.peers.lm_client", str(port)]


def mooncake(python: str, folder: Path, stack: ExitStack) -> Sequence[str]:
    """A master and one provider of memory, as Mooncake's own instructions start them."""
    enter_own_network()
    port, metrics_port = free_ports(2)
    master = [
        str(Path(python).with_name("mooncake_master")), "--rpc_address", ADDRESS, "--rpc_port", str(port),
        "--metrics_host", ADDRESS, "--metrics_port", str(metrics_port), "--enable_metric_reporting=false",
    ]  # fmt: skip
    run_child(stack, "mooncake_master", master, folder / "master", lambda: listens(port))
    ready = folder / "provider.ready"
    module = "agent.bench.peers.mooncake_provider"
    provider = [python, "-P", "-m", module, str(port), str(PROVIDER_BYTES), str(ready)]
    run_child(stack, "Mooncake's provider", provider, folder / "provider", ready.exists)
    return [python, "-P", "-m", "agent.bench.peers.mooncake_client", str(port)]


PEERS: dict[str, Clients] = {"lm": lm, "mooncake": mooncake}


def enter_own_network() -> None:
    """Leave the machine's network for one of this process's own, with its loopback up.

    Without the privilege a user namespace is made as well, which Linux lets everybody do by default. Raises
    NotHere where it does not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        why = os.strerror(ctypes.get_errno())
        raise NotHere(
            f"no network of its own for a server that listens on all addresses: {why}; "
            "allow unprivileged user namespaces, or run it with CAP_SYS_ADMIN"
        )
    with socket.socket() as any_socket:
        asked = _IFREQ.pack(b"lo", 0)
        _, flags = _IFREQ.unpack(fcntl.ioctl(any_socket, SIOCGIFFLAGS, asked))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | IFF_UP))


def _ended(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    peer, python, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    signal.signal(signal.SIGTERM, _ended)
    try:
        with ExitStack() as stack:
            command = PEERS[peer](python, folder, stack)
            return subprocess.run(command, check=False, preexec_fn=die_with_parent).returncode
    except NotHere as why:
        print(json.dumps({"not_here": str(why)}), flush=True)
        return 1
    except G35Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
