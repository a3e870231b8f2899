"""A member of the pool that has lost what was on it, and answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.attach.map_watch import EVERY_SECONDS
from tests.support.pool.memory_pool import nguid_of
from tests.unit.pool.test_tenants import NUMBERS, Flash


@pytest.mark.expects_log("does not carry the pool's map any more .it is blank.")
@pytest.mark.expects_log("carries the pool's map again")
def test_a_member_that_has_become_blank_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flash = Flash()
    watch = flash.watch(tmp_path)

    def look(times: int) -> None:
        for _ in range(times):
            flash.channel.clock += EVERY_SECONDS
            flash.channel.run(watch.look(flash.channel))

    blank, nguid = flash.namespaces[1], nguid_of(1).hex()
    blank.unreadable = {0}
    look(2 * len(NUMBERS))
    assert not watch.without_map, "what cannot be read is not blank"
    blank.blocks[0] = bytes(4096)
    blank.unreadable = set()
    look(2 * len(NUMBERS))
    assert not watch.without_map, "there is the other copy"
    before, blank.blocks = blank.blocks, {}
    look(3 * len(NUMBERS))
    assert watch.without_map == {nguid: "it is blank"}
    blank.down = True
    look(len(NUMBERS))
    assert watch.without_map, "nothing else is known of it"
    assert len(caplog.messages) == 1, "once is enough"
    blank.down, blank.blocks = False, before
    flash.replace(flash.pool_map)
    look(len(NUMBERS))
    assert not watch.without_map
