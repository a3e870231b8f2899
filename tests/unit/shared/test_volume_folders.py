"""What the kernel is told of the folder of a volume, where its manifest is read beside a change of it."""

from __future__ import annotations

from typing import Any, cast

from agent.fs.shared.names import Names, folder
from agent.fs.shared.paths import ROOT_PATH
from agent.fs.shared.volume import SharedVolume
from agent.fs.shared.volume_folders import VolumeFolders
from agent.pool.steps import Steps
from tests.support.pool.memory_channel import MemoryChannel

INO = 7


def mode_of(mode: int) -> Any:
    return folder(ROOT_PATH, mode, 5, 5, 0)


class NamesAnsweredLater:
    def newest(self, volume: SharedVolume, path: bytes) -> Steps[Any]:
        found = mode_of(0o755)
        yield cast(Any, None)
        return found


def ended(steps: Steps[Any]) -> Any:
    try:
        steps.send(True)
    except StopIteration as end:
        return end.value
    raise AssertionError("they wait for more")


def ended_at_once(steps: Steps[Any]) -> Any:
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    raise AssertionError("it is asked for anew, though it was changed a moment ago")


def test_a_look_that_a_change_overtook_tells_of_the_change() -> None:
    channel = MemoryChannel([])
    folders = VolumeFolders(
        {INO: cast(SharedVolume, None)}, lambda: channel, cast(Names, NamesAnsweredLater()), (5, 5)
    )
    look = folders.find(INO)
    next(look)
    folders.is_now(INO, mode_of(0o700))
    assert ended(look).mode & 0o7777 == 0o700
    again = folders.find_again(INO)
    assert ended_at_once(again).mode & 0o7777 == 0o700
