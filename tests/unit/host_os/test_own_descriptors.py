"""Descriptors that a process of ours sends us."""

from __future__ import annotations

import os
import socket

import pytest

from agent.host_os.own_descriptors import receive_from_ours


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_programs_that_we_start_get_none_of_them(kind: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    events = [os.eventfd(0) for _ in range(2)]
    try:
        with ours, theirs:
            socket.send_fds(theirs, [b"two"], events)
            message, found = receive_from_ours(ours, 16, 4)
        assert message == b"two"
        assert [os.get_inheritable(each) for each in found] == [False, False]
        os.eventfd_write(events[1], 7)
        assert os.eventfd_read(found[1]) == 7
        for each in found:
            os.close(each)
    finally:
        for each in events:
            os.close(each)


def test_a_message_without_any() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(b"none")
        assert receive_from_ours(ours, 16, 4) == (b"none", [])
        theirs.close()
        assert receive_from_ours(ours, 16, 4) == (b"", [])
