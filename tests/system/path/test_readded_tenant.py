"""A tenant that was erased and added again, and a reader that starts anew before its agent does."""

from __future__ import annotations

import os
import signal
from typing import Any

from host_shim.block_key import key_of
from host_shim.pool import Pool
from tests.support.pool.two_tenants import TwoTenants
from tests.support.waiting import wait_until


def test_a_reader_serves_no_volume_that_its_agent_does_not_serve(two_tenants: TwoTenants) -> None:
    two_tenants.configure("processes = 2")
    agent = two_tenants.serve()
    folders = [two_tenants.mount / "kv", two_tenants.mount / ".g35/process-1/kv"]
    with Pool(two_tenants.mount) as pool:

        def reader() -> dict[str, Any]:
            row: dict[str, Any] = pool.stats()["processes"][0]
            return row

        def is_dropped() -> bool:
            return not any("blue" in os.listdir(each) for each in folders)

        wait_until(lambda: reader()["state"] == "serving", 60, "the reader to serve")
        assert pool.volume("blue").put(key_of("a value"), b"of blue")
        assert two_tenants.tenant("erase", "blue", "--yes")[0] == 0
        wait_until(is_dropped, 20, "both processes to drop the tenant")
        assert two_tenants.tenant("add", "blue")[0] == 0, "it is served from the agent's next start on"
        os.kill(reader()["pid"], signal.SIGKILL)
        wait_until(lambda: (reader()["starts"], reader()["state"]) == (2, "serving"), 60, "another reader")
        assert is_dropped()
        assert "red" in os.listdir(folders[1])
    assert agent.stop(30) == 0
    agent = two_tenants.serve()
    assert "blue" in os.listdir(folders[0])
    assert agent.stop(30) == 0
