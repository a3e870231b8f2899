"""Clients of S3 that engines bring: LMCache's s3 adapter, by its own check, and NIXL's OBJ plug-in."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.cli.up.agent_toml import S3_BUCKET, S3_BUCKET_ADDRESS
from tests.support.engines.engine_environments import engine_python, run_in_engine
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes


@pytest.fixture
def up(processes: Processes, tmp_path: Path) -> Iterator[PoolUp]:
    made = PoolUp(processes, tmp_path / "state", "--s3", "--drive-size", "256M", "--enclosures", "1")
    yield made
    made.down()


def test_the_check_of_lmcache_passes_on_its_s3_adapter(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python = engine_python("lmcache")
    up: PoolUp = request.getfixturevalue("up")
    found = configparser.ConfigParser()
    found.read(up.state / "s3.credentials")
    adapter = {
        "type": "s3",
        "s3_endpoint": f"s3://{S3_BUCKET_ADDRESS}:{(up.state / 's3.port').read_text().strip()}",
        "s3_region": "us-east-1",
        "s3_num_io_threads": 4,
        "s3_prefer_http2": False,
        "disable_tls": True,
        "aws_access_key_id": found["default"]["aws_access_key_id"],
        "aws_secret_access_key": found["default"]["aws_secret_access_key"],
    }
    check = ["-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--obj-size", "262144"]
    done = subprocess.run(
        [str(python), *check, "--l2-adapter", json.dumps(adapter)],
        env=dict(os.environ, PYTHONDONTWRITEBYTECODE="1"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for line in ("5/5 correctly absent", "5/5 found", "Validation (content): 5/5"):
        assert line in done.stdout, done.stdout


def test_the_obj_plug_in_of_nixl_moves_blocks(request: pytest.FixtureRequest) -> None:
    engine_python("nixl")
    up: PoolUp = request.getfixturevalue("up")
    where = f"127.0.0.1:{(up.state / 's3.port').read_text().strip()}"
    steps = Path(__file__).with_name("nixl_obj_steps.py")
    said = run_in_engine("nixl", steps, where, S3_BUCKET, str(up.state / "s3.credentials"))
    assert "the same" in said
