"""The figures of `make bench` that only the tests' own tools can take: pods in virtual time, a campaign, what
KV events cost.

    python -m tests.support.rungs.bench_more build/bench.json

adds their records to the file that `g35 bench --json` wrote. What they print is theirs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from agent.sim import pod_report
from tests.support.campaign import __main__ as campaign
from tests.support.rungs import events_cost

SMALL_PODS = 200
CAMPAIGN_SECONDS = 60


def main(words: list[str]) -> int:
    """0 where all went well; the records are written either way."""
    bench = Path(words[0])
    with tempfile.TemporaryDirectory(prefix="g35-bench-more-") as folder:
        pods, told, events = (Path(folder, name) for name in ("pods.json", "campaign.json", "events.json"))
        codes = [
            pod_report.main(["--small", str(SMALL_PODS), "--full", "1", "--json", str(pods)]),
            campaign.main(["--seconds", str(CAMPAIGN_SECONDS), "--json", str(told)]),
            events_cost.main(["--json", str(events)]),
        ]
        records = json.loads(bench.read_text())
        for file in (pods, told, events):
            records += json.loads(file.read_text())
    bench.write_text(json.dumps(records, indent=1) + "\n")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
