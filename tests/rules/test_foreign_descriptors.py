"""Descriptors and memory of strangers come in by agent/host_os, and nobody else touches any.

Why: fstat(2), mmap(2) and close(2) of a stranger's file take as long as he likes, past SIGKILL, and an access
to his memory may be a SIGBUS. `agent/host_os/foreign_descriptors.py` and `foreign_memory.py` keep both out.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.rungs.tree import programs

OWNERS = (
    "agent/host_os/descriptor_receiver.py",
    "agent/host_os/foreign_descriptors.py",
    "agent/host_os/foreign_memory.py",
)
RECEIVING = {"recvmsg", "recvmsg_into", "recv_fds", "pidfd_getfd", "SCM_RIGHTS", "_SYS_PIDFD_GETFD"}
RECEIVES_OTHERWISE = {
    "agent/host_os/own_descriptors.py": "what processes send that we started, or that are the agent's: "
    "/dev/fuse by fusermount3, a connection that was accepted, a guest's queue as the first process found it",
    "agent/bench/virtio_driver/connection.py": "a front-end of ours before the agent that it drives",
    "emulator/lab/vhost_messages.py": "the relay before a QEMU that we started: it keeps what belongs to "
    "that guest alone, hands it to the agent, and ends with that guest",
    "emulator/roce/bench.py": "UDP datagrams, which carry none",
    "nvmeof/transport/tcp_connection.py": "NVMe/TCP, which carries none",
    "emulator/roce/link/udp.py": "the error queue of a UDP socket, which carries none",
}
MAPS_OTHERWISE = {
    "agent/fs/virtiofs/guest_books.py": "a file that the agent has made in its state folder",
    "agent/fs/guest_sessions.py": "a memfd that the agent has made itself, for its own processes",
    "agent/bench/virtio_driver/guest_memory.py": "memfds that the driver has made itself",
    "agent/pool/volume/set_versions.py": "a memfd that the agent has made itself, for its own processes",
    "emulator/lab/device_setup.py": "memory of the guest that this relay serves, and with which it ends",
    "host_shim/registered_memory.py": "a memfd that the client has made itself",
}
HANDLERS = (
    "agent/fs/control/registered_memory.py",
    "agent/fs/virtiofs/back_end.py",
    "agent/fs/virtiofs/device.py",
    "agent/fs/virtiofs/door.py",
    "agent/fs/virtiofs/front_end_link.py",
    "agent/fs/virtiofs/queue_worker.py",
    "agent/fs/virtiofs/front_end_descriptors.py",
)
"""Modules through whose hands a stranger's descriptor goes."""
TOUCHING = {
    "close",
    "fstat",
    "fstatvfs",
    "read",
    "pread",
    "write",
    "pwrite",
    "lseek",
    "fsync",
    "dup",
    "fdopen",
    "mmap",
}
OF_OUR_OWN = {
    "agent/fs/virtiofs/door.py": {"os.close(self._stop_event)"},
    "agent/fs/virtiofs/front_end_link.py": {"os.close(fd)"},  # the inflight area that went out with a reply
    "agent/fs/virtiofs/queue_worker.py": {"os.close(self._stop_event)"},
    "agent/fs/virtiofs/front_end_descriptors.py": {"os.close(fd)", "os.close(new)", "os.close(self._fd)"},
}
"""`fd` of front_end_descriptors is the inflight area that it makes; the others are its eventfds."""


def test_descriptors_are_received_in_one_place(repository: Path) -> None:
    found = {
        name
        for name, program in programs(repository).items()
        if any(node.attr in RECEIVING for node in program.nodes(ast.Attribute))
        or any(node.id in RECEIVING for node in program.nodes(ast.Name))
    }
    assert found <= {*OWNERS, *RECEIVES_OTHERWISE}
    assert set(RECEIVES_OTHERWISE) <= found, "an exception that nobody needs"


def test_memory_of_a_descriptor_is_mapped_in_one_place(repository: Path) -> None:
    found = {
        name
        for name, program in programs(repository).items()
        if "mmap" in program.text
        for node in program.nodes(ast.Call)
        if ast.unparse(node.func) == "mmap.mmap" and ast.unparse(node.args[0]) != "-1"
    }
    assert found <= {*OWNERS, *MAPS_OTHERWISE}
    assert set(MAPS_OTHERWISE) <= found, "an exception that nobody needs"


def test_who_handles_a_strangers_descriptor_calls_nothing_that_its_file_system_answers(
    repository: Path,
) -> None:
    found = {
        (name, ast.unparse(node))
        for name, program in programs(repository).items()
        if name in HANDLERS
        for node in program.nodes(ast.Call)
        if isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("os", "mmap")
        and node.func.attr in TOUCHING
    }
    allowed = {(name, call) for name, calls in OF_OUR_OWN.items() for call in calls}
    assert found == allowed
