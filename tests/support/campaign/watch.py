"""Memory and descriptors of the processes of a campaign, and operations that hang."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Sequence

from tests.support.campaign.client import Client
from tests.support.campaign.pod import AGENTS, ENCLOSURES, Pod
from tests.support.campaign.resource_trend import ResourceTrend

EVERY_SECONDS = 0.25
AGENT_BYTES_MAX = 900 << 20
"""Caches by default: 256 MiB of prestaged values, 256 MiB of staged files, 64 MiB each of directories, of
S3's bodies and of values that write-back has yet to store; and 200 MiB for the rest."""
ENCLOSURE_BYTES_MAX = 300 << 20
DESCRIPTORS_MAX = 300
LOG_BYTES_MAX = 1 << 20
LOG_BYTES_EACH_FAULT = 32 << 10


class Watch(threading.Thread):
    """Looks around four times a second until it is told to stop."""

    def __init__(self, pod: Pod, clients: Sequence[Client], stop: threading.Event) -> None:
        super().__init__(name="watch", daemon=True)
        self._pod, self._clients, self._over = pod, clients, stop
        self.trend = ResourceTrend(pod.folder, pod.names)
        self.descriptors: Counter[str] = Counter()
        """The most that each process had open."""

    def run(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            self.look()

    def look(self) -> None:
        """One look at everything."""
        for client in self._clients:
            client.look(time.monotonic())
        self.trend.look()
        for name, started in list(self._pod.running.items()):
            try:
                count = len(os.listdir(f"/proc/{started.pid}/fd"))
            except OSError:
                continue  # it has just been killed
            self.descriptors[name] = max(self.descriptors[name], count)

    def complaints(self, faults: int) -> list[str]:
        """What has outgrown its bound."""
        most = {f"agent-{agent}": AGENT_BYTES_MAX for agent in AGENTS}
        most |= {f"jbof-{at}": ENCLOSURE_BYTES_MAX for at in range(ENCLOSURES)}
        wrong = self.trend.complaints(most, LOG_BYTES_MAX + LOG_BYTES_EACH_FAULT * faults)
        return wrong + [
            f"{name} had {count} descriptors; {DESCRIPTORS_MAX} are allowed"
            for name, count in sorted(self.descriptors.items())
            if count > DESCRIPTORS_MAX
        ]
