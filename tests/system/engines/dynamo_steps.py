"""Run by Dynamo's interpreter: how much of a trace's prompts its replay finds again, by blocks of room.

    dynamo_steps.py TRACE BLOCK_TOKENS BLOCKS [BLOCKS ...]

One engine computes one prompt after the other, each long after the one before, so that room alone decides.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from dynamo import _core  # type: ignore[import-not-found]


def main(trace: str, block_tokens: str, *rooms: str) -> None:
    with tempfile.TemporaryDirectory(prefix="g35-dynamo-") as folder:
        apart = Path(folder) / "trace.jsonl"
        with Path(trace).open() as lines, apart.open("w") as out:
            for number, line in enumerate(lines):
                request = json.loads(line) | {"timestamp": number * 100_000, "output_length": 1}
                print(json.dumps(request), file=out)
        found = {}
        for room in rooms:
            engine = {
                "num_gpu_blocks": int(room), "block_size": int(block_tokens), "enable_prefix_caching": True,
            }  # fmt: skip
            played = _core.run_mocker_trace_replay(
                [str(apart)], extra_engine_args={"engine": engine}, trace_block_size=int(block_tokens)
            )
            summary = dict(played.summary)
            found[room] = {
                name: summary[name] for name in ("completed_requests", "prefix_cache_reused_ratio")
            }
    print("found", json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
