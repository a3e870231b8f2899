"""Time to the first token of whole engines: computed, computed and stored, loaded by a new process.

    python -m tests.support.engines.first_token_of_engines --prefix 2048 --json FILE

For each engine of `SETUPS` (or those that --engine names) this starts a pool, the engine without it, the
engine with it, and the engine anew. Each is asked one prompt unmeasured and then the same prompts. All three
have to say the same, and the last has to load every prefix. It takes engines of `make engines`, and prints a
table for a page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.host_os.result_file import result_file
from tests.support.engines.whole_engine_setups import SETUPS, Setup
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes

MODELS: dict[str, dict[str, int]] = {
    "small": {},
    "medium": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
}
"""`small` is that of the tests. `medium` has 94 million weights in its layers, and 16 KiB a token."""
VALUE_SIZES = {"small": "1028K", "medium": "2052K"}
"""Of /kv: a chunk of LMCache's (128 tokens) and its label."""
MEASURED = ("vllm", "vllm's fs tier", "lmcache", "lmcache's fs connector", "llama.cpp")
WARM_UP = 1000
"""A prompt that nothing is measured with: the first one of a process compiles and allocates."""


@dataclass(frozen=True)
class Row:
    """Medians over the prompts: seconds to the first token, and the processor's for an answer, three ways."""

    name: str
    prefix: int
    first_s: tuple[float, float, float]
    """Computed, computed and stored, loaded."""
    processor_s: tuple[float, float, float]
    """Of the engine's process alone, without the agent's."""


class Different(Exception):
    """An engine said something else after a load, or did not load all."""


def measure(setup: Setup, name: str, folder: Path, model: str, prefix: int, prompts: int) -> Row:
    """One row. Raises `Different`."""
    processes = Processes(folder)
    changes: dict[str, Any] = {"prefix": prefix}
    if MODELS[model]:
        changes |= {"model": MODELS[model], "kv_bytes": 1 << 29, "cpu_bytes": 1 << 29}
    try:
        pool = PoolUp(
            processes, folder / "state", "--drives", "1", "--drive-size", "8G", "--value-size",
            VALUE_SIZES[model], "--read-deadline-ms", "2000", "--no-restart",
        )  # fmt: skip
        runs = []
        try:
            for mount in (None, pool.mount, pool.mount):
                with setup.start(processes, folder, mount, **changes) as engine:
                    engine.ask(WARM_UP)
                    runs.append(engine.ask(*range(prompts)))
                    engine.end()
        finally:
            pool.down()  # or its mount stays
    finally:
        processes.end_all()
    computed, stored, loaded = runs
    for run in (stored, loaded):
        if [each.said for each in run] != [each.said for each in computed]:
            raise Different(f"{name} did not say the same as without the pool")
    if [each.cached for each in loaded] != [prefix] * prompts:
        raise Different(f"{name} loaded {[each.cached for each in loaded]} tokens of {prefix}")
    first_s = [statistics.median(each.first_s for each in run) for run in runs]
    processor_s = [statistics.median(each.processor_s for each in run) for run in runs]
    return Row(name, prefix, _three(first_s), _three(processor_s))


def _three(values: list[float]) -> tuple[float, float, float]:
    computed, stored, loaded = values
    return computed, stored, loaded


HEAD = """\
| engine | prefix | computed | and stored | loaded | processor: computed | and stored | loaded |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def line(row: Row) -> str:
    """A row as a page has it."""
    seconds = " | ".join(f"{each:.2f} s" for each in (*row.first_s, *row.processor_s))
    return f"| {row.name} | {row.prefix} tokens | {seconds} |"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engine", action="append", choices=SETUPS, help="one of these; may stand several times"
    )
    parser.add_argument("--model", choices=MODELS, default="medium")
    parser.add_argument("--prefix", type=int, default=2048, help="tokens, a multiple of 128")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--json", type=result_file)
    given = parser.parse_args(words)
    if given.prefix < 128 or given.prefix % 128:
        parser.error("--prefix is a multiple of 128")
    print(f"{os.cpu_count()} processors, {platform.machine()}, model {given.model}\n{HEAD}", flush=True)
    rows = []
    for name in given.engine or MEASURED:
        with tempfile.TemporaryDirectory(prefix="g35-first-token-") as folder:
            rows.append(measure(SETUPS[name], name, Path(folder), given.model, given.prefix, given.prompts))
        print(line(rows[-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
