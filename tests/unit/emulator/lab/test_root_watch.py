"""A guest's root is this machine's: that it changed meanwhile is seen and named."""

from __future__ import annotations

import os
from pathlib import Path

from emulator.lab.machine import WATCHED, RootWatch


def test_a_root_that_stands_still_is_not_blamed() -> None:
    assert any(each.exists() for each in WATCHED)
    assert RootWatch((Path("/proc/version"), Path("/no/such"))).what_changed() == ""


def test_a_library_that_is_replaced_is_named(tmp_path: Path) -> None:
    """As dpkg does it: beside the old one, then by rename; also where its size and time stay."""
    folder, cache = tmp_path / "lib", tmp_path / "cache"
    folder.mkdir()
    cache.write_text("old")
    watch = RootWatch((folder, cache, tmp_path / "none"))
    times = os.stat(cache)
    (tmp_path / "new").write_text("new")
    os.utime(tmp_path / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "new").rename(cache)
    assert str(cache) in watch.what_changed()
    assert str(folder) not in watch.what_changed()
    (folder / "libc.so").touch()
    (tmp_path / "none").touch()
    changed = watch.what_changed()
    assert "install nothing" in changed
    assert all(str(each) in changed for each in (folder, tmp_path / "none"))
