"""Which local namespace each path of [[local]] led to, in the agent's state folder.

So an SSD that is away, a file that was removed or a device that was emptied is noticed. A new namespace in
its place would be a loss that nobody is told of. The file is one JSON object, NGUIDs (hex) by paths.
"""

import json
import logging
from pathlib import Path
from typing import Final

from agent.errors import G35Error
from agent.host_os.whole_file import write_whole

log = logging.getLogger(__name__)

FILE: Final = "local_labels.json"
ROWS_MAX: Final = 256
"""The paths noted earliest go. A configuration has at most 64."""


class RememberedLabels:
    """Of one state folder. Raises G35Error where its file is damaged. For one thread."""

    def __init__(self, state: Path) -> None:
        self._file = state / FILE
        self._rows: dict[str, str] = {}
        try:
            found = json.loads(self._file.read_text())
        except FileNotFoundError:
            return
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
            raise G35Error(
                f"{self._file} is damaged", "see that all devices of [[local]] are there; remove it"
            )
        self._rows = found

    def of(self, path: Path) -> str:
        """The NGUID (hex) of the namespace that the path led to; empty where none is known."""
        return self._rows.get(str(path), "")

    def note(self, path: Path, nguid: bytes) -> None:
        """A file that cannot be written is a line in the log: the namespace is served at any rate."""
        if self.of(path) == nguid.hex():
            return
        self._rows.pop(str(path), None)
        self._rows[str(path)] = nguid.hex()
        for earliest in list(self._rows)[:-ROWS_MAX]:
            del self._rows[earliest]
        try:
            write_whole(self._file, json.dumps(self._rows))
        except OSError as failed:
            log.warning("cannot note local namespaces in %s: %s", self._file, failed.strerror or failed)
