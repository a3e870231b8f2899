"""Plays pods in virtual time and says how they did: `python -m agent.sim.pod_report`.

It prints the hit ratio, the bytes that changes of the map moved and the time to notice a sick enclosure, and
with --json writes the record `sim_seeds_passed` in the shape of `g35 bench --json`.
"""

import argparse
import json
from collections.abc import Sequence
from statistics import median

from agent.host_os.result_file import result_file
from agent.sim.pod_shapes import full_shape
from agent.sim.pod_simulation import PodSimulation


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every seed passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=35, help="what G35_SEED is for the tests")
    parser.add_argument("--small", type=int, default=1000, help="small pods to play")
    parser.add_argument("--full", type=int, default=2, help="pods of 36 enclosures to play")
    parser.add_argument("--only", type=int, help="one small pod, by its number, with what it counted")
    parser.add_argument("--json", type=result_file, help="where to write the record")
    chosen = parser.parse_args(arguments)
    if chosen.only is not None:
        return _one(PodSimulation((chosen.seed, chosen.only)))
    failed = []
    for number in range(chosen.small):
        try:
            PodSimulation((chosen.seed, number)).run()
        except Exception as error:
            failed.append(number)
            print(f"small pod {chosen.seed} {number}: {error!r}")
    full = [PodSimulation((chosen.seed, number), full_shape()) for number in range(chosen.full)]
    for pod in full:
        pod.scheduler.call_at(pod.scheduler.now + 2.0, lambda pod=pod: pod.change_map("join", pod.rng))  # type: ignore[misc]
        pod.run()
        print(f"full pod {pod.seed}:", *pod.report(), sep="\n  ")
    passed = chosen.small - len(failed) + len(full)
    print(f"{passed} of {chosen.small + len(full)} seeds passed")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([_record(passed, failed, full)], indent=1) + "\n")
    return 1 if failed else 0


def _one(pod: PodSimulation) -> int:
    print(pod.shape)
    try:
        print(pod.run())
    finally:
        print(dict(pod.counts), *pod.report(), sep="\n")
    return 0


def _record(passed: int, failed: Sequence[int], full: Sequence[PodSimulation]) -> dict[str, object]:
    noticed = {
        fault: [each.seconds for pod in full for each in pod.noticed if each.fault == fault]
        for fault in ("stop", "slow")
    }
    gets = sum(pod.counts["gets"] for pod in full)
    joins = [each for pod in full for each in pod.moved if each.change == "join"]
    return {
        "name": "sim_seeds_passed",
        "value": passed,
        "unit": "seeds",
        "failed": list(failed),
        "full_size": len(full),
        "hit_ratio": sum(pod.counts["hits"] for pod in full) / gets if gets else None,
        "join_bytes_moved": sum(each.bytes_moved for each in joins),
        "join_bytes_stored": sum(each.bytes_stored for each in joins),
        "join_values_moved_by_agents": sum(pod.counts["values moved"] for pod in full),
        "leave_bytes_gone": sum(
            each.bytes_moved for pod in full for each in pod.moved if each.change == "leave"
        ),
        "notice_s_median": {fault: round(median(times), 2) for fault, times in noticed.items() if times},
    }


if __name__ == "__main__":
    raise SystemExit(main())
