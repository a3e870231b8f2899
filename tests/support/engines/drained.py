"""Until a connector's threads have nothing to do."""

from __future__ import annotations

from host_shim.connector_jobs import JobRunner


def drained(runner: JobRunner, seconds: float) -> bool:
    """Wait until nothing waits and nothing runs; False where `seconds` were not enough."""
    with runner._changed:
        return runner._changed.wait_for(
            lambda: not (runner._urgent or runner._rest or runner._running), timeout=seconds
        )
