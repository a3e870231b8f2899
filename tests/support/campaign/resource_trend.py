"""Memory of the processes of a pool and bytes of their logs, over a long run.

Looks are thinned as they grow many, so that a week costs no more memory than an hour.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

LOOKS_MAX = 512
_PAGE_BYTES = resource.getpagesize()
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Look:
    """Resident bytes of a process (by id: one that was started again is another) at a time in seconds."""

    seconds: float
    process_id: int
    resident: int


class ResourceTrend:
    """Looks at the processes that have a pid file `NAME.pid` in `state`."""

    def __init__(self, state: Path, names: Sequence[str]) -> None:
        self.log_bytes = 0
        self._state = state
        self._looks: dict[str, list[Look]] = {name: [] for name in names}
        self._began = time.monotonic()

    def look(self) -> None:
        """Take one look at all; a process that is just being started again is left out."""
        for name, looks in self._looks.items():
            try:
                process_id = int((self._state / f"{name}.pid").read_text())
                resident = int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * _PAGE_BYTES
            except (OSError, ValueError):
                continue
            looks.append(Look(time.monotonic() - self._began, process_id, resident))
            if len(looks) > LOOKS_MAX:
                del looks[1:-1:2]
        self.log_bytes = sum(file.stat().st_size for file in self._state.glob("*.log"))

    def lines(self) -> list[str]:
        """For each process: first, greatest and last resident memory, and how it grew in its last life."""
        found = []
        for name, looks in self._looks.items():
            if not looks:
                continue
            last_life = [look for look in looks if look.process_id == looks[-1].process_id]
            minutes = (last_life[-1].seconds - last_life[0].seconds) / 60
            grown = (last_life[-1].resident - last_life[0].resident) / _MIB
            lives = len({look.process_id for look in looks})
            found.append(
                f"{name}: resident {looks[0].resident / _MIB:.1f} MiB at first, "
                f"{max(look.resident for look in looks) / _MIB:.1f} at most, "
                f"{looks[-1].resident / _MIB:.1f} at last; "
                f"{grown:+.1f} in the last {minutes:.1f} min of its {lives}. life"
            )
        return found

    def growth_percent(self, name: str) -> float | None:
        """How much the resident memory of a process grew in its last life, once its caches had filled.

        The first third of that life is left out; of the rest, the median of the last fifth is held against
        that of the first. None where there were too few looks.
        """
        looks = self._looks[name]
        life = [look for look in looks if look.process_id == looks[-1].process_id]
        settled = [look.resident for look in life[len(life) // 3 :]]
        fifth = len(settled) // 5
        if not fifth:
            return None
        first, last = median(settled[:fifth]), median(settled[-fifth:])
        return 100 * (last - first) / first

    def complaints(self, resident_max: Mapping[str, int], log_bytes_max: int) -> list[str]:
        """What has outgrown its bound."""
        wrong = [
            f"{name} had {max(look.resident for look in self._looks[name]) / _MIB:.0f} MiB resident; "
            f"{most / _MIB:.0f} are allowed"
            for name, most in resident_max.items()
            if any(look.resident > most for look in self._looks[name])
        ]
        if self.log_bytes > log_bytes_max:
            wrong.append(f"the logs have {self.log_bytes:,} bytes; {log_bytes_max:,} are allowed")
        return wrong
