"""A device that is opened on a thread of its own: an SSD may hang where its label is read, for minutes.

The thread cannot be ended. So there is one for each section at the most, and what it opens after nobody wants
it any more is closed again. The same holds for a label that a verb reads beside the agent.
"""

import threading
import time
from pathlib import Path
from typing import Final

from agent.config.local_section import LocalSection
from agent.errors import G35Error
from agent.inline.crc64 import engine
from agent.local.device import Device, open_device, read_label
from nvmeof.linux_limits import MORE_THREADS, SureThread

OPEN_SECONDS: Final = 3.0
"""How long a start waits for its devices, all together."""


class StillOpening(G35Error):
    """The device has not answered yet."""


class Opening:
    """One try to open a device, from construction on. `take` and `give_up` are for one thread."""

    def __init__(self, section: LocalSection, had: str, *, make: bool) -> None:
        engine()  # loaded now, for the label: on a slow machine that takes as long as a device may
        self.began = time.monotonic()
        self._section = section
        self._had = had
        self._make = make
        self._changed = threading.Condition()
        self._is_wanted = True
        self._device: Device | None = None
        self._failed: Exception | None = None
        try:
            SureThread(self._run, f"open-{section.path.name}").start()
        except RuntimeError as refused:
            # Others may have all threads: it is no reason to serve nothing. The next look tries again.
            self.give_up()
            self._failed = G35Error(f"no thread to open {section.path}: {refused}", MORE_THREADS)

    def _run(self) -> None:
        try:
            device = open_device(self._section, self._had, make=self._make)
        except Exception as failed:
            with self._changed:
                self._failed = failed
                self._changed.notify_all()
            return
        with self._changed:
            if self._is_wanted:
                self._device = device
            else:
                device.close()
            self._changed.notify_all()

    def take(self, seconds: float) -> Device:
        """The device, which is the caller's to close. Raises StillOpening after so many seconds, and what
        `open_device` raised."""
        with self._changed:
            is_over = self._changed.wait_for(lambda: self._device or self._failed, max(0.0, seconds))
            if self._failed is not None:
                raise self._failed
            if not is_over or self._device is None:
                raise StillOpening(f"{self._section.path} does not answer while it is opened", "see dmesg")
            device, self._device = self._device, None
            self._is_wanted = False
            return device

    def give_up(self) -> None:
        """Nobody takes it any more; idempotent."""
        with self._changed:
            self._is_wanted = False
            if self._device is not None:
                self._device.close()
                self._device = None


def nguid_of(path: Path, had: str) -> bytes:
    """The NGUID of a device that another process has; `had` (hex) where it does not answer. Raises G35Error,
    and `StillOpening` where nothing is known."""
    engine()
    found: list[bytes | G35Error] = []

    def read() -> None:
        try:
            found.append(read_label(path).nguid)
        except G35Error as failed:
            found.append(failed)

    try:
        reader = SureThread(read, f"label-{path.name}")
        reader.start()
    except RuntimeError as refused:
        raise G35Error(f"no thread to read {path}: {refused}", MORE_THREADS) from None
    reader.join(OPEN_SECONDS)
    if not found:
        if not had:
            raise StillOpening(f"{path} does not answer while its label is read", "see dmesg")
        return bytes.fromhex(had)
    (first,) = found
    if isinstance(first, G35Error):
        raise first
    return first
