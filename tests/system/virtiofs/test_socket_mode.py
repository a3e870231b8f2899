"""The socket of a guest's device: whoever may open it is the guest, so nobody else may."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from agent.fs.virtiofs.door import listen


def test_the_socket_of_a_guest_is_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "made" / "guest.sock"
    before = os.umask(0)
    try:
        with listen(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, "whatever the umask"
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    finally:
        os.umask(before)
