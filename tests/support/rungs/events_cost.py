"""What KV events cost: processor time of the events of blocks, by that of storing the blocks.

    python -m tests.support.rungs.events_cost [--json FILE]

A client puts values of 64 KiB through a mount. Its processor time counts, with the agent's and the
enclosure's. Then the events of as many blocks go to a subscriber at the pace of those puts. The event side is
the queue, the thread and vLLM's form of message over ZeroMQ, as a connector has them. The subscriber does not
count. `events_cost_percent` is what throughput can lose to events, where processors are what it lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agent.bench.contents import Contents
from agent.bench.fault_probes import VALUE_BYTES, small_pool
from agent.cli.up.layout import Layout
from agent.host_os.result_file import result_file
from host_shim.block_key import key_of
from host_shim.kv_events import GATHER_SECONDS, EventStream, KvEvents, ZmqPublisher
from host_shim.pool import Pool

BLOCKS = 1000
ROUNDS = 5
LAST_MESSAGE_SECONDS = 5 * GATHER_SECONDS
"""By then the last events have gone. A look every now and then would count as their cost."""
SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.setsockopt(zmq.SUBSCRIBE, b"")
socket.connect(sys.argv[1])
print("ready", flush=True)
while True:
    socket.recv_multipart()
"""


def main(words: list[str]) -> int:
    """0 where it could be measured."""
    parser = argparse.ArgumentParser(description="Measure what KV events cost a put of 64 KiB.")
    parser.add_argument("--json", type=result_file)
    into = parser.parse_args(words).json
    with tempfile.TemporaryDirectory(prefix="g35-events-cost-") as folder:
        puts, pace = _puts(Path(folder, "pool"))
        costs = _events(f"ipc://{folder}/events", pace)
    percent = [100 * cost / puts for cost in costs]
    record = {
        "name": "events_cost_percent",
        "value": statistics.median(percent),
        "unit": "%",
        "range": [min(percent), max(percent)],
        "put_processor_us": puts * 1e6,
        "event_processor_us": statistics.median(costs) * 1e6,
    }
    print(
        f"events_cost_percent {record['value']:.2f} % ({min(percent):.2f} to {max(percent):.2f}): "
        f"{record['event_processor_us']:.1f} of {record['put_processor_us']:.0f} us a put"
    )
    if into is not None:
        into.write_text(json.dumps([record], indent=1) + "\n")
    return 0


def _puts(folder: Path) -> tuple[float, float]:
    """Processor seconds of one put, of all processes that it takes; and seconds by the clock."""
    contents = Contents(VALUE_BYTES)
    with small_pool(folder, 1) as layout, Pool(layout.default_mount) as pool:
        volume, used, began = pool.volume("kv"), _used(layout), time.monotonic()
        for number in range(BLOCKS):
            assert volume.put(key_of(f"event {number}"), contents.value(number % 16))
        return (_used(layout) - used) / BLOCKS, (time.monotonic() - began) / BLOCKS


def _used(layout: Layout) -> float:
    """Processor seconds so far of this process and of those of the pool."""
    pids = [str(os.getpid())]
    for entry in Path("/proc").iterdir():
        words = (
            (entry / "cmdline").read_bytes() if entry.name.isdigit() and (entry / "cmdline").exists() else b""
        )
        if bytes(layout.state) in words:
            pids.append(entry.name)
    ticks = 0
    for pid in pids:
        fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _events(endpoint: str, pace: float) -> list[float]:
    """Processor seconds of this process for the event of one block, a figure a round."""
    subscriber = subprocess.Popen(
        [sys.executable, "-c", SUBSCRIBER, endpoint], stdout=subprocess.PIPE, text=True
    )
    try:
        assert subscriber.stdout is not None
        assert subscriber.stdout.readline()
        events = KvEvents()
        stream = EventStream(events, ZmqPublisher(endpoint))
        # ZeroMQ says to nobody when a subscriber is there: events of the first round may go to none.
        blocks = [key_of(f"event {number}") for number in range(BLOCKS)]
        costs = []
        for number in range(ROUNDS):
            telling = _processor_seconds(events, [b"%d" % number + block for block in blocks], pace)
            costs.append((telling - _processor_seconds(None, blocks, pace)) / BLOCKS)
            assert not len(events)
        stream.close()
        assert not events.lost
        assert events.count == ROUNDS * BLOCKS
        return costs
    finally:
        subscriber.kill()
        subscriber.communicate()


def _processor_seconds(events: KvEvents | None, blocks: list[bytes], pace: float) -> float:
    """Of this process while blocks are told of at a pace; where `events` is None, of the pace alone."""
    began = time.process_time()
    for block in blocks:
        if events is not None:
            events.stored([block])
        time.sleep(pace)
    time.sleep(LAST_MESSAGE_SECONDS)
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
