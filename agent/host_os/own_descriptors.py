"""Descriptors that a process sends us which we started, or which runs this program beside us."""

import socket

from agent.host_os.descriptor_receiver import DESCRIPTOR, descriptors_in


def receive_from_ours(link: socket.socket, bytes_max: int, descriptors_max: int) -> tuple[bytes, list[int]]:
    """A message and the descriptors with it, which programs that we start do not get. Raises OSError.

    Not socket.recv_fds(): in Python 3.11 it passes no flags on. The kernel leaves descriptors out where this
    process may have no more.
    """
    room = socket.CMSG_SPACE(descriptors_max * DESCRIPTOR.size)
    message, ancillary, _, _ = link.recvmsg(bytes_max, room, socket.MSG_CMSG_CLOEXEC)
    return message, descriptors_in(ancillary)
