"""Whether this machine's root changes while a guest runs on it.

The guest reads programs and libraries from here, and believes that they stand still (`cache=loose` in
init.sh). A package that is installed meanwhile gives it half of an old library and half of a new one: its
programs end by SIGSEGV, or do not start. So the change is seen, and named where a guest fails.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

LIBRARIES = Path("/usr/lib", sysconfig.get_config_var("MULTIARCH") or "")
WATCHED = (
    *(Path("/var/lib/dpkg/status"), Path("/var/lib/dpkg/info"), Path("/var/lib/dpkg/updates")),
    *(Path("/etc/ld.so.cache"), Path("/usr/bin"), Path("/usr/sbin"), Path("/usr/lib"), LIBRARIES),
    *(Path(sys.prefix, "bin"), Path(sysconfig.get_path("platlib"))),
)
"""What an installation changes, by dpkg or by pip: files, and folders in which names come and go."""


class RootWatch:
    """Remembers how the root is now. Asking costs a stat(2) for each place."""

    def __init__(self, places: Sequence[Path] = WATCHED) -> None:
        self._places = places
        self._before = self._stamps()

    def _stamps(self) -> dict[Path, tuple[int, int, int]]:
        found = {}
        for place in self._places:
            try:
                stat = os.stat(place)
            except OSError:
                continue
            found[place] = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        return found

    def what_changed(self) -> str:
        """A sentence that names what is not as it was; empty where all is."""
        now = self._stamps()
        changed = [str(each) for each in self._places if now.get(each) != self._before.get(each)]
        if not changed:
            return ""
        return (
            f"this machine's root, which is the guest's, changed while the guest ran ({', '.join(changed)}): "
            "install nothing meanwhile, and run it again"
        )
