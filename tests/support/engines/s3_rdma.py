"""The S3 door with an emulated NIC, its clients, and a network that loses datagrams of theirs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.bench.s3_rdma_client import S3RdmaClient
from agent.s3.credentials import AccessKey
from emulator.roce.link.base import Link
from emulator.roce.nic.verbs import Burst
from emulator.roce.runtime.device import Device
from nvmeof.transport.verbs_provider import free_loopback_address
from tests.support.engines.s3_served import EMULATED, KEY, Served, served


@contextmanager
def rdma_served(folder: Path, **section: Any) -> Iterator[Served]:
    with served(folder, rdma=free_loopback_address(), **section) as made:
        yield made


def rdma_client(s3: Served, key: AccessKey | None = None, source: str = "") -> S3RdmaClient:
    """A client with a device of its own, not connected yet."""
    return S3RdmaClient("127.0.0.1", s3.port, key or KEY, EMULATED, free_loopback_address(), source)


class LossyLink:
    """A `Link` round another that loses some of the bursts which it is given."""

    def __init__(self, link: Link, chance: float) -> None:
        self._link = link
        self._chance = chance
        self._dice = random.Random(7)
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def send(self, burst: Burst) -> None:
        if self._dice.random() < self._chance:
            self.count += 1
            return
        self._link.send(burst)


@contextmanager
def lossy(monkeypatch: pytest.MonkeyPatch, chance: float) -> Iterator[list[LossyLink]]:
    """Devices that are opened meanwhile have lossy links: these."""
    made: list[LossyLink] = []
    plain = Device._open_link

    def open_link(device: Device, ip: str, check_in_full: bool, ecn: bool) -> Any:
        made.append(LossyLink(plain(device, ip, check_in_full, ecn), chance))
        return made[-1]

    with monkeypatch.context() as patched:
        patched.setattr(Device, "_open_link", open_link)
        yield made
