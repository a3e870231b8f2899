"""rdma-core's own tests of pyverbs, on the stand-in: none fails, and skipped is what no device here does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.roce import rdma_core_source
from tests.support.roce.verbs_pair import addresses

PASSED = {
    "test_addr": 3, "test_atomic": 7, "test_cq": 4, "test_cq_events": 2, "test_cqex": 4, "test_device": 13,
    "test_fork": 1, "test_mr": 13, "test_pd": 4, "test_qp": 22, "test_qpex": 18, "test_rdmacm": 10,
    "test_relaxed_ordering": 2, "test_srq": 3,
}  # fmt: skip
"""Tests of each module that pass; the rest is skipped."""

NOT_HERE = (
    "XRC", "Device memory", "dmabuf", "Raw Packet QP", "FLUSH", "flush",
    "All gid indices populated", "Extended QP is not supported",
)  # fmt: skip
"""In the reasons of what is skipped."""


def test_none_of_rdma_cores_tests_fails(repository: Path) -> None:
    try:
        folder = rdma_core_source.tests_folder()
    except rdma_core_source.CannotFetch as error:
        pytest.skip(f"rdma-core's tests cannot be had ({error}): name a package index to pip, PIP_INDEX_URL")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.roce.rdma_core_program"),
            *(str(folder), "roce0", addresses(1)[0], *PASSED),
        ],
        cwd=repository,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failed = {name: trace for result in results for name, trace in result["failed"].items()}
    assert not failed, "\n".join(failed.values())
    assert {result["module"]: result["passed"] for result in results} == PASSED
    odd = [
        why for result in results for why in result["skipped"].values() if not any(w in why for w in NOT_HERE)
    ]
    assert not odd
