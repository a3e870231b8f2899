"""The command that runs an engine's own tests on two agents, with tests of ours in the engine's place."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from tests.support.engines import their_own_tests
from tests.support.engines.engine_environments import engine_python

TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(16))
def test_a_block(tmp_path, number):
    block = os.urandom(200_000)
    (tmp_path / "block.tmp").write_bytes(block)
    os.replace(tmp_path / "block.tmp", tmp_path / "block")
    assert (tmp_path / "block").read_bytes() == block, "other bytes"

def test_a_link(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
"""


@pytest.mark.nightly  # A person runs this command; what it breaks is broken in system/path each time.
@pytest.mark.timeout(600)
def test_rounds_with_faults_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine_python("nixl")
    (tmp_path / "test_blocks.py").write_text(TESTS)
    packages = sysconfig.get_paths()["purelib"]
    assert their_own_tests.main(["nixl", str(tmp_path / "test_blocks.py"), "--packages", packages]) == 0
    said = capsys.readouterr().out
    for agent in ("first", "second"):
        for what in ("nothing broken", "afterwards"):
            assert f"{what}, {agent} agent: 1 failure, 16 passed" in said
        for what in ("bits flipped in 20% of all reads", "an enclosure stopped for 8 tests"):
            assert f"{what}, {agent} agent: " in said
    assert "test_a_link: PermissionError" in said
    assert "other bytes" not in said
