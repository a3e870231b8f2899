"""What a thread does turn by turn: each duty by itself, so that one that fails keeps no other from its turn.

A duty that raises is a bug, or a fault that nobody has thought of. Its traceback is logged once, for it comes
again with every turn; after that it is counted (`upkeep_failures` of the status). Once it has gone well
again, its next failure is logged anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)


class Duties:
    """The duties of one thread by their names, in their order. `failed` may be read by any thread."""

    def __init__(self, duties: Mapping[str, Callable[[], None]]) -> None:
        self._duties = duties
        self._failing: dict[str, str] = {}
        """What each duty that fails was last heard to raise."""
        self.failed = dict.fromkeys(duties, 0)
        """How often each has raised since the start."""

    def turn(self) -> None:
        """Do each. Raises nothing but what ends a process."""
        for name, duty in self._duties.items():
            try:
                duty()
            except Exception as failure:
                self.failed[name] += 1
                kind = type(failure).__name__
                if self._failing.get(name) != kind:
                    self._failing[name] = kind
                    log.exception(
                        "%s failed; it is tried again with every turn, and not said again while it is %s",
                        name,
                        kind,
                    )
            else:
                if self._failing.pop(name, None) is not None:
                    log.warning("%s goes well again, after %d failures", name, self.failed[name])
