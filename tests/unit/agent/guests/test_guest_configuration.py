"""What `[[virtiofs]]` may say, and what an agent does whose doors end one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from agent.config.configuration import Configuration, VirtioFsSection, parse_configuration
from agent.errors import ConfigError, G35Error
from agent.fs.virtiofs.door import listen
from agent.service.doors import MOUNT_DOOR
from agent.service.run import _until_over


def configured(*devices: dict[str, Any]) -> Configuration:
    enclosure = {"name": "shelf", "address": "127.0.0.1", "port": 4420, "nqn": "nqn.2026-01.io.g35:jbof-0"}
    agent = {"state": "/tmp/none", "key_file": "/tmp/none/root.key"}
    return parse_configuration(
        {"agent": agent, "enclosures": [enclosure], "virtiofs": list(devices)}, "the test"
    )


def test_one_that_can_be_used() -> None:
    [device] = configured({"socket": "/run//g35/./gpu0.sock", "subtree": "/gpu0/..data"}).virtiofs
    assert device.socket == Path("/run/g35/gpu0.sock")


@pytest.mark.parametrize(
    ("socket", "why"),
    [
        ("", "absolute"),
        ("gpu0.sock", "absolute"),
        ("/run/" + "x" * 103, "107 bytes"),
        ("/run/" + "ß" * 52, "107 bytes"),
    ],
)
def test_sockets_that_cannot_be(socket: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        configured({"socket": socket})
    assert VirtioFsSection(socket=Path("/run/" + "x" * 102)).socket


@pytest.mark.parametrize(
    "other", ["/run/gpu0.sock", "/run/./gpu0.sock", "//run/gpu0.sock", "/run/x/../gpu0.sock"]
)
def test_one_socket_for_two_guests(other: str) -> None:
    with pytest.raises(ConfigError, match="two guests"):
        configured({"socket": "/run/gpu0.sock"}, {"socket": other})


@pytest.mark.parametrize("subtree", ["..", "/blue/../red", "blue/..", "/./blue"])
def test_a_folder_that_leads_out(subtree: str) -> None:
    with pytest.raises(ConfigError, match=r"without \. and"):
        configured({"socket": "/run/gpu0.sock", "subtree": subtree})


def test_a_socket_under_a_file_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file" / "socket", tmp_path / "file" / "more" / "socket"):
        with pytest.raises(G35Error, match="cannot listen") as refused:
            listen(path)
        assert "folder" in refused.value.advice


class Ending:
    """A door that has ended, or not."""

    def __init__(self, *, over: bool = False, third: Callable[[], object] | None = None) -> None:
        """`third` is called at the third look."""
        self.over = over
        self.third = third
        self.asked = 0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == 0.0, "the event loop asks, and may not wait"
        self.asked += 1
        if self.asked == 3 and self.third is not None:
            self.third()
        return self.over


class TestDoorsThatEnd:
    async def serve(self, stop: trio.Event, **doors: Ending) -> None:
        named: Any = {name.replace("_", "-"): door for name, door in doors.items()}
        await _until_over(named, stop)

    def test_the_mount(self) -> None:
        trio.run(lambda: self.serve(trio.Event(), fuse=Ending(over=True), virtiofs_0=Ending()))

    def test_the_last_one(self) -> None:
        trio.run(lambda: self.serve(trio.Event(), virtiofs_0=Ending(over=True)))

    @pytest.mark.expects_log("served no longer; the others are")
    def test_a_guests_device_alone(self, caplog: pytest.LogCaptureFixture) -> None:
        """The mount and the other guest stay, and it is said once."""

        async def main() -> None:
            stop = trio.Event()
            other = Ending(third=stop.set)
            await self.serve(stop, fuse=Ending(), virtiofs_0=Ending(over=True), virtiofs_1=other)

        trio.run(main)
        assert MOUNT_DOOR == "fuse"
        assert [each.levelno for each in caplog.records if "virtiofs-0" in each.getMessage()] == [
            logging.ERROR
        ]
