"""`g35 doctor`: what this machine has of what g35 needs, and what to do about the rest."""

import errno
import importlib.util
import json
import os
import platform
import resource
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from agent.cli.doctor_engines import Engine, Finding, Verdict, engine_findings
from agent.cli.record_options import AsJson
from agent.cli.tables import folding_table
from agent.fs.doors.mounting import dead_mount_advice, may_mount, mounts_of_agents
from agent.host_os.hung_agent import LOOK_SECONDS, AgentHangs, asked
from nvmeof import compiled
from nvmeof.linux_limits import refusal
from nvmeof.transport.verbs_provider import ROCE_PORT, load_verbs, why_unavailable

_QUEUE_LOCKED_BYTES = 7 << 20
"""Registered for one RDMA queue to one enclosure: 6 MiB of buffers and up to 1 MiB of capsules."""


def doctor(
    context: typer.Context,
    as_json: AsJson = False,
    engine: Annotated[
        Engine | None,
        typer.Option(
            help="Look at this engine and the pool instead (docs/engines): llama-cpp, lmcache, nixl, sglang "
            "or vllm."
        ),
    ] = None,
    python: Annotated[
        Path | None, typer.Option(help="With --engine: the engine's Python; default: that of `make engines`.")
    ] = None,
    # A Path would be looked at by Click, which waits for ever for an agent that hangs.
    mount: Annotated[str, typer.Option(help="With --engine: where the pool is mounted.")] = "/mnt/g35",
    volume: Annotated[str, typer.Option(help="With --engine: the volume of /kv for its blocks.")] = "kv",
    options: Annotated[
        str | None,
        typer.Option(
            help="With --engine: judge its configuration: our connector's options, the folder of its own "
            "files, the size of its memory. A file, its text, or the engine's command line."
        ),
    ] = None,
) -> None:
    """Check this machine: needs of the agent, tools of tests and lab, dead mounts.

    Exit code 1 where something that is needed is missing.
    """
    for name in ("python", "mount", "volume", "options"):
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        if engine is None:
            raise typer.BadParameter(f"--{name} is of an engine; --engine says which one")
        if engine is Engine.NIXL and name == "volume":
            raise typer.BadParameter(
                "NIXL goes by files of /fs: it has no volume of /kv, and no connector of ours",
                param_hint="--volume",
            )
        if engine is Engine.LLAMA_CPP and name in ("python", "volume"):
            raise typer.BadParameter(
                "llama.cpp's server goes by files of /shared: it has no interpreter, and no volume of /kv",
                param_hint=f"--{name}",
            )
    findings = list(examine() if engine is None else engine_findings(engine, python, mount, volume, options))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        table = folding_table("", ("", "what", "found", "what to do"))
        for finding in findings:
            # Words and paths as they are: `[[spill]]` is no markup.
            table.add_row(*map(Text, (finding.verdict.value, finding.name, finding.detail, finding.advice)))
        Console().print(table)  # folds in a pipe, too: these are sentences
    if any(finding.verdict is Verdict.MISSING for finding in findings):
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """All findings, the necessary ones first."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _hot_modules,
        _dev_fuse,
        _mounting,
        _mount_for_others,
        _crc,
        _s3_client,
        _pyfuse3,
        _verbs,
        _verbs_nodes,
        _locked_memory,
        _emulated_verbs,
    )
    for check in checks:
        yield check()
    yield from _mounts_that_fail()
    for program, use, package in (
        ("qemu-system-x86_64", "the lab, a real kernel that judges us", "qemu-system-x86"),
        ("redis-server", "the comparison in g35 bench", "redis-server"),
        ("nvme", "the lab's tests", "nvme-cli"),
    ):
        yield _program(program, use, package)


def _ok(name: str, detail: str) -> Finding:
    return Finding(name, Verdict.OK, detail)


def _without(name: str, detail: str, advice: str) -> Finding:
    return Finding(name, Verdict.WITHOUT, detail, advice)


def _python() -> Finding:
    return _ok("Python", f"{platform.python_version()} at {sys.executable}")


def _hot_modules() -> Finding:
    if compiled.state == compiled.COMPILED:
        return _ok("hot modules", "compiled")
    return _without("hot modules", compiled.state, "it works, and takes more processor time")


def _dev_fuse() -> Finding:
    name = "/dev/fuse"
    if not os.path.exists(name):
        return Finding(name, Verdict.MISSING, "absent", "load the kernel's fuse module (modprobe fuse)")
    if not os.access(name, os.R_OK | os.W_OK):
        return _without(name, "not readable for this user", "fusermount3 mounts; workers share one queue")
    return _ok(name, f"kernel {platform.release()}")


def _mounting() -> Finding:
    if may_mount():
        who = "as root" if os.geteuid() == 0 else "with CAP_SYS_ADMIN"
        return _ok("mounting", f"{who}, by mount(2)")
    helper = shutil.which("fusermount3")
    if helper is None:
        advice = "apt-get install fuse3, or the unit of `g35 config unit`"
        return Finding("mounting", Verdict.MISSING, "neither CAP_SYS_ADMIN nor fusermount3", advice)
    return _ok("mounting", f"by {helper}")


def _mount_for_others(configuration: Path = Path("/etc/fuse.conf")) -> Finding:
    """agent.allow_other, which a service in front of the mount needs, such as one that gives it to a host."""
    name = "mount for others"
    if may_mount():
        return _ok(name, "allow_other needs no permission here")
    try:
        lines = configuration.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    if any(line.strip() == "user_allow_other" for line in lines):
        return _ok(name, f"user_allow_other in {configuration}")
    advice = "write it there, or set agent.allow_other = false"
    return _without(name, f"no user_allow_other in {configuration}", advice)


def _crc() -> Finding:
    from agent.inline.crc64 import engine

    if engine() == "awscrt":
        return _ok("CRC-64", engine())
    return _without("CRC-64", "crcmod only, slow", "pip install awscrt")


def _s3_client() -> Finding:
    if importlib.util.find_spec("awscrt") is None:
        return _without(
            "awscrt.s3", "not installed: [[spill]] works with folders, not with buckets", "pip install awscrt"
        )
    return _ok("awscrt.s3", "evicted values can go to buckets ([[spill]])")


def _pyfuse3() -> Finding:
    try:
        importlib.import_module("pyfuse3")
    except Exception as error:
        advice = 'wanted for the reference door (agent.door = "pyfuse3")'
        return _without("pyfuse3", f"{type(error).__name__}: {error}", advice)
    return _ok("pyfuse3", "imports")


def _verbs() -> Finding:
    why = why_unavailable("pyverbs")
    if why is None:
        return _ok("verbs", ", ".join(load_verbs("pyverbs").devices()))
    cure = (
        "an RDMA NIC, or `rdma link add rxe0 type rxe netdev eth0`"
        if why.startswith("it imports")
        else "apt-get install python3-pyverbs, the same release as rdma-core"
    )
    return _without(
        "verbs", why, f"wanted for RDMA devices: {cure}; NVMe/TCP and the emulated RDMA need none"
    )


def _verbs_nodes(folder: Path = Path("/dev/infiniband")) -> Finding:
    """The files that verbs and the connection manager are reached by; `verbs` above sees only sysfs."""
    name = "verbs device files"
    nodes = sorted(folder.glob("uverbs*")) if folder.is_dir() else []
    if not nodes:
        return _without(name, f"none in {folder}", "for RDMA devices: modprobe ib_uverbs")
    connection_manager = folder / "rdma_cm"
    if not connection_manager.exists():
        return _without(name, f"no {connection_manager}", "modprobe rdma_ucm")
    closed = [str(each) for each in (*nodes, connection_manager) if not os.access(each, os.R_OK | os.W_OK)]
    if closed:
        advice = "chmod 666 by a udev rule, or a group that the agent's user is in"
        return _without(name, f"closed to this user: {', '.join(closed)}", advice)
    return _ok(name, f"{len(nodes)} and rdma_cm")


def _locked_memory() -> Finding:
    """How much an RDMA device may register of this process: RLIMIT_MEMLOCK, unless root asks."""
    name = "locked memory"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or os.geteuid() == 0:
        return _ok(name, "no limit")
    queues = limit // _QUEUE_LOCKED_BYTES
    detail = f"{limit >> 20} MiB: {queues} RDMA queues"
    if queues >= 32:
        return _ok(name, detail)
    return _without(
        name,
        detail,
        "for RDMA devices: LimitMEMLOCK= of the service, ulimit -l. It is the limit of each process: the "
        "first has (workers + 4) queues to each enclosure and some more, each further one nearly as many",
    )


def _emulated_verbs() -> Finding:
    why = why_unavailable("emulator.roce.pyverbs")
    if why is None:
        return _ok("emulated verbs", f"on addresses whose UDP port {ROCE_PORT} is free")
    return _without("emulated verbs", why, "wanted for NVMe/RDMA without an RDMA device")


def _mounts_that_fail(
    table: Path = Path("/proc/self/mountinfo"), seconds: float = LOOK_SECONDS
) -> list[Finding]:
    """Mounts of agents that are dead (ENOTCONN) or stopped; all are waited for together, for `seconds`."""
    name, mounts = "mounts", sorted(set(mounts_of_agents(table)))
    found: dict[Path, Finding] = {}

    def look_at(mount: Path) -> None:
        try:
            asked(mount, partial(os.statvfs, mount), seconds)
        except AgentHangs as hangs:
            found[mount] = Finding(name, Verdict.MISSING, hangs.message, hangs.advice)
        except OSError as failure:
            if failure.errno == errno.ENOTCONN:
                found[mount] = Finding(name, Verdict.MISSING, f"dead: {mount}", dead_mount_advice([mount]))
        except (RuntimeError, MemoryError) as failure:
            why, advice = refusal(failure) or (str(failure), "try it again")
            found[mount] = _without(name, f"{mount} was not looked at: {why}", advice)

    threads = [threading.Thread(target=look_at, args=(mount,)) for mount in mounts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fails = [found[mount] for mount in mounts if mount in found]
    return fails or [_ok(name, "none dead")]


def _program(program: str, use: str, package: str) -> Finding:
    found = shutil.which(program)
    if found is None:
        return _without(program, "absent", f"for {use}: apt-get install {package}")
    return _ok(program, found)
