"""Every pinned package is there for the architecture of a DPU; skipped where no package index answers.

`make arm64` goes on from here: it fetches them, builds what comes as source, and runs the tests there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deploy import arm64
from tests.support.deploy.arm64 import FROM_SOURCE, PYTHON, pins, pip_words

_AWAY = ("connection broken by", "ResolutionError", "Timeout", "ProxyError", "SSLError", "HTTP error")
"""What pip says of an index that it cannot ask. What it then makes of that is no answer."""


@pytest.mark.nightly  # It asks the package index of what seldom changes; the pins are compared each time.
def test_there_are_wheels_for_aarch64(repository: Path, tmp_path: Path) -> None:
    lines = pins(repository / "requirements.lock", from_source=False)
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--retries", "1", "--timeout", "15", "-q"]
    try:
        asked = subprocess.run(
            [
                sys.executable, "-m", "pip", "install", *options, "--target", str(tmp_path / "nowhere"),
                "--report", "-", *pip_words(PYTHON), *lines,
            ],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        pytest.skip("the package index does not answer in 120 s: name another to pip, PIP_INDEX_URL")
    if asked.returncode != 0 and any(word in asked.stderr for word in _AWAY):
        pytest.skip("no package index can be reached: name one to pip, PIP_INDEX_URL")
    assert asked.returncode == 0, asked.stderr[-2000:]
    found = {
        each["metadata"]["name"].lower().replace("_", "-") for each in json.loads(asked.stdout)["install"]
    }
    assert found == {line.partition("==")[0] for line in lines}


def test_what_is_built_from_source_is_pinned(repository: Path) -> None:
    built = {line.partition("==")[0] for line in pins(repository / "requirements.lock", from_source=True)}
    assert built == set(FROM_SOURCE)


def test_no_download_brings_a_second_version_of_what_is_pinned(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All the wheels are installed at once, without their dependencies: pip refuses two of one name.
    wheels, asked = tmp_path / "wheels", list[tuple[str, ...]]()
    monkeypatch.setattr(arm64, "_pip", lambda *words: (wheels.mkdir(exist_ok=True), asked.append(words)))
    arm64.fetch_packages(wheels)
    lock = str(repository / "requirements.lock")
    for words in asked:
        assert "--no-deps" in words or lock in words
