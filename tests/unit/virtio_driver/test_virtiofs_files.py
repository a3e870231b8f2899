"""Files through a virtio-fs device, as far as that goes without one."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest

from agent.bench.virtio_driver.machine import Machine
from agent.bench.virtiofs_files import VirtiofsFiles


class Device:
    """Stands for a machine and its client; remembers what was released."""

    memory = None

    def __init__(self) -> None:
        self.client = self
        self.number = 7
        self.released: list[int] = []

    def walk(self, _path: str) -> Device:
        return self

    def open(self, _node: int, _flags: int) -> int:
        return 9

    def release(self, _node: int, handle: int) -> None:
        self.released.append(handle)


def test_a_child_of_a_fork_leaves_the_device_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    files = VirtiofsFiles(cast(Machine, cast(Any, device)))
    ours, parents = files.open("a"), files.open("b")
    files.close(ours)
    assert device.released == [9]
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    files.close(parents)
    assert device.released == [9]
