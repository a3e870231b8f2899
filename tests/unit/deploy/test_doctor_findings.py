"""What `g35 doctor` makes of a machine on which an agent shall run as a service."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent.cli import doctor_verb
from agent.cli.doctor_verb import Finding, Verdict
from agent.cli.main import _application
from agent.host_os import hung_agent


@pytest.fixture
def no_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_verb, "may_mount", lambda: False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def test_one_capability_mounts_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_verb, "may_mount", lambda: True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    finding = doctor_verb._mounting()
    assert (finding.verdict, finding.detail) == (Verdict.OK, "with CAP_SYS_ADMIN, by mount(2)")


@pytest.mark.usefixtures("no_capability")
def test_without_it_and_without_the_helper_there_is_no_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert doctor_verb._mounting().verdict is Verdict.MISSING


@pytest.mark.usefixtures("no_capability")
@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("user_allow_other\n", Verdict.OK),
        ("mount_max = 10\n  user_allow_other  \n", Verdict.OK),
        ("#user_allow_other\n", Verdict.WITHOUT),
        ("", Verdict.WITHOUT),
        (None, Verdict.WITHOUT),
    ],
)
def test_who_may_open_the_mount_to_others(tmp_path: Path, text: str | None, verdict: Verdict) -> None:
    file = tmp_path / "fuse.conf"
    if text is not None:
        file.write_text(text)
    assert doctor_verb._mount_for_others(file).verdict is verdict


def test_the_files_of_verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "infiniband"
    assert doctor_verb._verbs_nodes(folder).advice.endswith("modprobe ib_uverbs")
    folder.mkdir()
    (folder / "uverbs0").touch()
    assert doctor_verb._verbs_nodes(folder).advice == "modprobe rdma_ucm"
    (folder / "rdma_cm").touch()
    assert doctor_verb._verbs_nodes(folder).verdict is Verdict.OK
    monkeypatch.setattr(os, "access", lambda path, _mode: not str(path).endswith("uverbs0"))
    closed = doctor_verb._verbs_nodes(folder)
    assert closed.verdict is Verdict.WITHOUT
    assert closed.detail == f"closed to this user: {folder}/uverbs0"


@pytest.mark.usefixtures("no_capability")
@pytest.mark.parametrize(
    ("limit", "verdict", "detail"),
    [
        (8 << 20, Verdict.WITHOUT, "8 MiB: 1 RDMA queues"),
        (8 << 30, Verdict.OK, "8192 MiB: 1170 RDMA queues"),
        (resource.RLIM_INFINITY, Verdict.OK, "no limit"),
    ],
)
def test_how_much_may_be_registered(
    monkeypatch: pytest.MonkeyPatch, limit: int, verdict: Verdict, detail: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))
    finding = doctor_verb._locked_memory()
    assert (finding.verdict, finding.detail) == (verdict, detail)
    assert ("each process" in finding.advice) == (verdict is Verdict.WITHOUT), "an agent may have several"


MOUNTS = r"""24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 24 0:51 / /mnt/stopped rw,nosuid,nodev - fuse.g35 g35 rw,user_id=0
32 24 0:52 / /mnt/a\040pool rw,nosuid,nodev shared:7 - fuse.g35 g35 rw,user_id=0
33 24 0:53 / /mnt/of-another-user rw,nosuid,nodev - fuse.g35 g35 rw,user_id=1000
34 24 0:54 / /mnt/alive rw,nosuid,nodev - fuse.g35 g35 rw,user_id=0
35 24 0:55 / /mnt/not-ours rw,nosuid,nodev - fuse.sshfs host: rw,user_id=0
"""


@pytest.mark.parametrize(
    ("stopped", "rows"),
    [
        (False, [("dead: /mnt/a pool", " '/mnt/a pool'")]),
        (
            True,
            [
                ("dead: /mnt/a pool", " '/mnt/a pool'"),
                (
                    "the agent behind /mnt/stopped has not answered for 0.05 s: it is stopped or it hangs",
                    "`kill -CONT`",
                ),
            ],
        ),
    ],
)
def test_a_mount_that_does_not_answer_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool, rows: list[tuple[str, str]]
) -> None:
    table, end = tmp_path / "mountinfo", threading.Event()
    table.write_text(MOUNTS)

    def statvfs(mount: Path) -> None:
        if mount == Path("/mnt/stopped") and stopped:
            end.wait(60)
        if mount == Path("/mnt/a pool"):
            raise OSError(errno.ENOTCONN, "dead")
        if mount == Path("/mnt/of-another-user"):
            raise OSError(errno.EACCES, "not yours")
        assert mount != Path("/mnt/not-ours")

    def asked(mount: Path, call: Callable[[], object], seconds: float) -> object:
        # Who answers may be late on a busy machine; who does not is never on time.
        hangs = mount == Path("/mnt/stopped") and stopped
        return hung_agent.asked(mount, call, seconds if hangs else 60.0)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(doctor_verb, "asked", asked)
    try:
        found = doctor_verb._mounts_that_fail(table, seconds=0.05)
    finally:
        end.set()
    for finding, (detail, advice) in zip(found, rows, strict=True):
        assert (finding.verdict, finding.detail) == (Verdict.MISSING, detail)
        assert advice in finding.advice


def test_a_mount_that_could_not_be_looked_at_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS.splitlines()[1] + "\n")

    def refused(*_: object) -> object:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(doctor_verb, "asked", refused)
    (finding,) = doctor_verb._mounts_that_fail(table)
    assert finding.verdict is Verdict.WITHOUT
    assert finding.detail == "/mnt/stopped was not looked at: Linux refuses another thread"
    assert "ulimit" in finding.advice


def test_a_dead_mount_ends_doctor_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    good, dead = (Finding("mounts", verdict, "it") for verdict in (Verdict.WITHOUT, Verdict.MISSING))
    for finding, code in ((good, 0), (dead, 1)):
        monkeypatch.setattr(doctor_verb, "examine", lambda finding=finding: iter([finding]))
        assert CliRunner().invoke(_application("doctor"), ["doctor"]).exit_code == code


def test_brackets_of_a_finding_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    words = Finding("mounts", Verdict.WITHOUT, "no [[spill]] at /mnt/[red]", "umount '/mnt/[/red]'")
    monkeypatch.setattr(doctor_verb, "examine", lambda: iter([words]))
    shown = CliRunner().invoke(_application("doctor"), ["doctor"], env={"COLUMNS": "200"}).output
    assert words.detail in shown
    assert words.advice in shown
