"""Two plain links on loopback, for the tests of what they carry."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulator.roce.link.udp import UdpLink
from tests.support.roce.devices import some_ip


@pytest.fixture
def links() -> Iterator[tuple[UdpLink, UdpLink]]:
    first, second = UdpLink(some_ip()), UdpLink(some_ip())
    try:
        yield first, second
    finally:
        first.close()
        second.close()
