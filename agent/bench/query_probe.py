"""How long a router waits for the answer about a prompt of 1,000 keys whose directories are remembered."""

import http.client
import json
import statistics
import time
from pathlib import Path

from agent.bench.contents import Contents
from agent.bench.fault_probes import VALUE_BYTES, small_pool
from agent.bench.single_probes import Counted
from agent.cli.up.layout import Layout
from agent.errors import G35Error
from host_shim.block_key import key_of
from host_shim.pool import Pool

KEYS = 1000
QUERIES = 500
WARM_QUERIES = 20
QUERY_SECONDS = 0.02
"""From one query to the next: the door's threads rest after each for as long as it took
(agent/http/gil_yield.py), so one that follows at once waits for the rest of the one before."""
ENCLOSURES = 2


def measure(folder: Path) -> dict[str, Counted]:
    """`query_1k_p99_ms`, on a pool of its own below `folder`: one connection, 50 queries a second."""
    with small_pool(folder, ENCLOSURES, "--query") as layout:
        keys = [key_of(f"queried {number}") for number in range(KEYS)]
        contents = Contents(VALUE_BYTES)
        with Pool(layout.default_mount) as pool:
            blocks = pool.volume("kv")
            for number, key in enumerate(keys):
                if not blocks.put(key, contents.value(number % 16)):
                    raise G35Error("the agent refused a put into an empty volume")
        times, at_once = _asked(layout, keys, QUERY_SECONDS), _asked(layout, keys, 0)
    details = {
        "keys": KEYS,
        "queries": len(times),
        "p50_ms": statistics.median(times) * 1e3,
        "p50_ms_one_after_the_other": statistics.median(at_once) * 1e3,
    }
    return {"query_1k_p99_ms": Counted(sorted(times)[len(times) * 99 // 100] * 1e3, details)}


def _asked(layout: Layout, keys: list[bytes], apart: float) -> list[float]:
    """Seconds of each query, from its first byte to the answer's last; one begins `apart` seconds after the
    one before at the earliest."""
    token = layout.query_tokens.read_text().strip()
    body = json.dumps({"volume": "kv", "prompts": [[key.hex() for key in keys]]})
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", int(layout.query_port.read_text()), timeout=10)
    times = []
    try:
        for number in range(WARM_QUERIES + QUERIES):
            began = time.perf_counter()
            connection.request("POST", "/query", body, headers)
            answer = connection.getresponse()
            found = answer.read()
            took = time.perf_counter() - began
            time.sleep(max(0.0, apart - took))
            if answer.status != 200 or json.loads(found)["prompts"][0]["run"] != len(keys):
                raise G35Error(f"a query was answered with {answer.status}: {found[:200]!r}")
            if number >= WARM_QUERIES:
                times.append(took)
    finally:
        connection.close()
    return times
