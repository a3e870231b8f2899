"""A thread that works beside the agent's doors until it is told to stop."""

import logging
import threading
from abc import ABC, abstractmethod

log = logging.getLogger(__name__)


class OwnThread(ABC):
    """Its work looks at `stopping` between one thing and the next."""

    def __init__(self, name: str, stop_seconds: float | None, left: str) -> None:
        """It is waited for `stop_seconds`; after that `left`, for the log, says what is left behind."""
        self.stopping = threading.Event()
        self._name, self._stop_seconds, self._left = name, stop_seconds, left
        self._thread: threading.Thread | None = None

    @abstractmethod
    def _work(self) -> None: ...

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, if it was started. One that hangs ends with the process."""
        self.stopping.set()
        if self._thread is not None:
            self._thread.join(self._stop_seconds)
            if self._thread.is_alive():
                log.warning("%s is left behind", self._left)
