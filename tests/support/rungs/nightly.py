"""What `make nightly` runs: what is too slow for each change. Somebody runs it before each release.

First unit, pair and sim tests with a million fuzzed packets, a seed that nobody chose, long hypothesis runs
and all seeds of the simulations. Then the system tests that are marked `nightly`, the tests of
all engines that are installed (`make engines`), and the whole lab on two cores. A part
that fails keeps none of the others from its turn. The exit code is the first that is not 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.support.rungs.all_rungs import COMPUTE, LAB, first_failure, pytest_of
from tests.support.rungs.compiling import compile_all
from tests.support.sim.seed_counts import WHOLE

ALL = ""
"""For -m: tests that are marked nightly, and the others."""
LONG = {"G35_FUZZ": "1000000", "G35_SEED": "random", "G35_HYPOTHESIS": "long", "G35_SEEDS": WHOLE}


class Part(NamedTuple):
    """One run of pytest."""

    folders: Sequence[str]
    marks: str
    environment: Mapping[str, str]


PARTS = (
    Part([folder for folder in COMPUTE if folder != "rules"], ALL, LONG),
    Part(["system"], "nightly", {}),
    Part(["system/engines"], "not nightly", {"G35_ENGINES": "1"}),
    Part(LAB, ALL, {"G35_LAB_CORES": "2"}),
)


def run_nightly(words: Sequence[str]) -> int:
    """Run each part, `words` being options of pytest's for each; the exit code."""
    compile_all()
    return first_failure(
        [
            subprocess.call(
                pytest_of(part.folders, ["-m", part.marks, *words]), env={**os.environ, **part.environment}
            )
            for part in PARTS
        ]
    )


if __name__ == "__main__":
    try:
        sys.exit(run_nightly(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
