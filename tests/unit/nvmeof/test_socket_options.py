"""What both ends of NVMe/TCP ask of a socket: no delay, and no pacing within one machine."""

from __future__ import annotations

import socket

import pytest

from nvmeof.transport import socket_options
from nvmeof.transport.socket_options import UNPACED, set_options


class Recorded:
    """A socket that says where it leads and keeps what was asked; `refuses` what kernels may not have."""

    def __init__(self, here: str, there: str, *, refuses: bool = False) -> None:
        self.here, self.there, self.refuses = here, there, refuses
        self.options: list[tuple[int, int, object]] = []

    def getsockname(self) -> tuple[str, int]:
        return self.here, 1

    def getpeername(self) -> tuple[str, int]:
        return self.there, 2

    def setsockopt(self, level: int, option: int, value: object) -> None:
        if self.refuses and option == socket.TCP_CONGESTION:
            raise PermissionError
        self.options.append((level, option, value))


DELAY = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
PACING = (socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)


@pytest.mark.parametrize(
    ("here", "there", "within"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.8.0.9", True),
        ("::1", "::1", True),
        ("192.0.2.7", "192.0.2.7", True),
        ("192.0.2.7", "192.0.2.8", False),
        ("fe80::1%eth0", "fe80::2%eth0", False),
        ("2001:db8::1", "2001:db8::2", False),
    ],
)
def test_no_pacing_within_one_machine(here: str, there: str, within: bool) -> None:
    sock = Recorded(here, there)
    set_options(sock)  # type: ignore[arg-type]
    assert sock.options == ([DELAY, PACING] if within else [DELAY])


def test_a_kernel_that_does_not_have_it_is_left_alone() -> None:
    sock = Recorded("::1", "::1", refuses=True)
    set_options(sock)  # type: ignore[arg-type]
    assert sock.options == [DELAY]


def test_it_is_a_name_that_kernels_have() -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, socket_options.UNPACED)
        said = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert said.rstrip(b"\0") == socket_options.UNPACED == b"reno"
