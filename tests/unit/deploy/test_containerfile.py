"""The container file: what it must have, and what it must not, read without building it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.deploy.containerfile import Stage, parse


@pytest.fixture(scope="module")
def stages(repository: Path) -> list[Stage]:
    return parse((repository / "agent/deploy/Containerfile").read_text())


def test_both_stages_stand_on_the_same_named_release(stages: list[Stage]) -> None:
    assert [stage.base for stage in stages] == ["debian:12-slim", "debian:12-slim"]


def test_the_image_runs_as_nobody_important(stages: list[Stage]) -> None:
    user = stages[-1].last("USER")
    assert user is not None
    assert user.rest == "g35"
    after = stages[-1].instructions[stages[-1].instructions.index(user) + 1 :]
    assert not [each for each in after if each.word in ("RUN", "COPY", "USER")]


def test_its_health_is_the_agents_own_status(stages: list[Stage]) -> None:
    health = stages[-1].last("HEALTHCHECK")
    assert health is not None
    assert '"/opt/g35/bin/g35", "status", "--mount", "/mnt/g35"' in health.rest


def test_it_starts_the_agent(stages: list[Stage]) -> None:
    entry, command = stages[-1].last("ENTRYPOINT"), stages[-1].last("CMD")
    assert entry is not None
    assert command is not None
    assert entry.arguments() + command.arguments() == [
        "/opt/g35/bin/g35", "agent", "--config", "/etc/g35/agent.toml",
    ]  # fmt: skip


def test_packages_are_few_and_leave_no_lists(stages: list[Stage]) -> None:
    for stage in stages:
        for run in stage.all("RUN"):
            if "apt-get install" in run.rest:
                assert "--no-install-recommends" in run.rest
                assert "rm -rf /var/lib/apt/lists/*" in run.rest
    assert "gcc" not in " ".join(run.rest for run in stages[-1].all("RUN"))


def test_what_pip_installs_is_held_by_the_lock(stages: list[Stage]) -> None:
    (install,) = [run for run in stages[0].all("RUN") if "pip install" in run.rest]
    assert "-c /src/requirements.lock /src" in install.rest


def test_all_that_is_copied_is_in_the_checkout(repository: Path, stages: list[Stage]) -> None:
    for stage in stages:
        for copy in stage.all("COPY"):
            *sources, _place = copy.rest.split()
            if not sources[0].startswith("--from="):
                assert all((repository / source).exists() for source in sources), copy


def test_no_secret_is_built_in(stages: list[Stage]) -> None:
    words = " ".join(each.rest for stage in stages for each in stage.instructions)
    assert "root.key" not in words
    assert not [each for stage in stages for each in stage.all("ENV")]


def test_an_instruction_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="ADD"):
        parse("FROM debian:12-slim\nADD x /\n")
    with pytest.raises(ValueError, match="before any FROM"):
        parse("RUN true\n")
    assert parse("FROM a AS b\n# remark\nRUN one \\\n    && two\n")[0].instructions[0].rest == "one && two"
