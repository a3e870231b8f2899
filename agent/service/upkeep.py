"""The upkeep thread: it follows the pool map and does the work that may wait, duty by duty.

One thread does it all, for it alone changes volumes (agent/pool/volume/volume.py) and has the channel of its
queue id. A duty that fails keeps no other from its turn.
"""

import logging
import threading
from collections.abc import Callable, Mapping

from agent.fs.files.face import FilesFace
from agent.host_os.worker_thread import OwnThread
from agent.remote.channel import WorkerChannel

log = logging.getLogger(__name__)

EVERY_SECONDS = 0.5


class Duties:
    """The duties of one thread by their names, in their order. Any thread may read `failed`.

    A duty that raises is a bug, or a fault that nobody has thought of. It fails again with every turn, so its
    traceback is logged once, and logged anew once it has gone well in between.
    """

    def __init__(self, duties: Mapping[str, Callable[[], None]]) -> None:
        self._duties = duties
        self._failing: dict[str, str] = {}
        """The kind of exception that each failing duty raised last."""
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


class Upkeep(OwnThread):
    """`duties` gives the thread's duties, by its channel and the event that it has to stop. At the end, which
    is after the doors, it seals the staged bytes of `files`."""

    def __init__(
        self,
        take_channel: Callable[[], WorkerChannel],
        duties: Callable[[WorkerChannel, threading.Event], Mapping[str, Callable[[], None]]],
        files: FilesFace | None,
    ) -> None:
        # Sealing takes as long as it takes: somebody's file is staged.
        super().__init__("upkeep", None, "")
        self._take_channel, self._make_duties, self._files = take_channel, duties, files
        self._duties = Duties({})

    def failures(self) -> int:
        return sum(self._duties.failed.values())

    def _work(self) -> None:
        channel, stopping = self._take_channel(), self.stopping
        self._duties = Duties(self._make_duties(channel, stopping))
        while not stopping.wait(EVERY_SECONDS):
            self._duties.turn()
        if self._files is None:
            return
        try:
            if failures := channel.run(self._files.seal_everything()):
                log.warning("%d files could not be sealed", failures)
        except Exception:
            log.exception("sealing what is staged failed")
