"""`make deploy`: the container file and the systemd unit, tried for real, without an engine for either.

The container file's steps are carried out one by one in root file systems of Debian 12 (mmdebstrap's minbase
stands in for the base image), and its command and health check run there as its user. Then a Debian with
systemd is booted by systemd-nspawn, with the units as they are: an enclosure, a pool, the agent. There it is
killed, stopped in its tracks until the watchdog sees it, and ended; each time what was stored must be there.

What is kept is the bare Debian, in .cache/deploy, and after a failure the rest. Exit code 1: something was
not as it must be.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.deploy.containerfile import Instruction, Stage, parse
from tests.support.deploy.debian_root import Unavailable, command_in, make_root, require
from tests.support.waiting import wait_until

REPOSITORY = Path(__file__).parents[3]
CACHE = REPOSITORY / ".cache/deploy"
UNITS = REPOSITORY / "agent/deploy"
PORT = 48_135
CONFIGURATION = f"""
[agent]
mount = "/mnt/g35"
state = "/var/lib/g35/agent"
key_file = "KEY"
[[enclosures]]
name = "shelf-1"
address = "127.0.0.1"
port = {PORT}
nqn = "nqn.2026-01.io.g35:shelf-1"
[[volumes]]
name = "kv"
share = 1.0
"""
SERVICE_SECONDS = 300
_SERVICE_CHECKS = r"""
exec >/var/trial.log 2>&1
trap 'journalctl --no-pager -u "g35*" | tail -60; systemctl poweroff' EXIT
check() { name=$1; shift; if "$@"; then echo "RESULT ok $name"; else echo "RESULT failed $name"; fi; }
value=/mnt/g35/kv/kv/value
agent() { systemctl show -p MainPID --value g35-agent; }
again() { for _ in $(seq 100); do cmp -s /root/value $value && return; sleep 0.2; done; false; }
confined() { grep -q '^CapBnd:.*0000000000200000$' /proc/$1/status &&
    grep -q '^Seccomp:.*2$' /proc/$1/status &&
    grep -q '^NoNewPrivs:.*1$' /proc/$1/status && ! grep -q '^Uid:.*\b0\b' /proc/$1/status; }
secret() { key=$(cut -d: -f2 /etc/g35/root.key); ! grep -qaF "$key" /proc/$1/environ /proc/$1/cmdline; }
unmounted() { ! grep -q ' /mnt/g35 ' /proc/self/mountinfo; }
head -c 700000 /dev/urandom >/root/value
useradd --system --home-dir /var/lib/g35 --shell /usr/sbin/nologin g35
/opt/g35/bin/g35 key new /etc/g35/root.key
check 'the enclosure starts' systemctl start g35-jbof@shelf-1
for _ in $(seq 50); do /opt/g35/bin/g35 pool format --config /etc/g35/format.toml && break; sleep 0.2; done
check 'the agent says that it is ready' systemctl start g35-agent
check 'a value is stored' cp /root/value $value
check 'and served' again
check 'another user, one capability, a filter of system calls' confined "$(agent)"
check 'the key is in neither environment nor arguments' secret "$(agent)"
kill -9 "$(agent)"
check 'killed, it is back with what was stored' again
first=$(agent); kill -STOP "$first"
for _ in $(seq 100); do [ "$(agent)" != "$first" ] && [ "$(agent)" != 0 ] && break; sleep 0.2; done
check 'hung, the watchdog ends it' test "$(agent)" != "$first"
check 'and it is back' again
check 'it ends in order' systemctl stop g35-agent
check 'with no failure' test "$(systemctl show -p Result --value g35-agent)" = success
check 'and nothing is mounted' unmounted
check 'the enclosure ends' systemctl stop g35-jbof@shelf-1
"""
_STORE_AND_SERVE = """
head -c 700000 /dev/urandom >/tmp/value
cp /tmp/value /mnt/g35/kv/kv/value
cmp /tmp/value /mnt/g35/kv/kv/value
"""
_TRIAL_UNIT = """
[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/bin/bash /root/trial.sh
"""


def _network() -> dict[str, str]:
    """What pip is told here is told to pip there."""
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


def _copied_in(root: Path) -> None:
    """A root knows the network as this machine does, for the steps that install."""
    for name in ("etc/resolv.conf", "etc/hosts", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt"):
        if (Path("/") / name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path("/") / name, root / name)


def _clone(root: Path, copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["cp", "-a", "--reflink=auto", str(root), str(copy)], check=True, timeout=300)


def _copy(instruction: Instruction, root: Path, roots: dict[str, Path]) -> None:
    words = instruction.rest.split()
    source_root = REPOSITORY
    if words[0].startswith("--from="):
        source_root = roots[words.pop(0).removeprefix("--from=")]
    *sources, place = words
    for name in sources:
        source, target = source_root / name.lstrip("/"), root / place.lstrip("/")
        if source.is_dir():
            shutil.copytree(
                source,
                target,
                symlinks=True,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def build(stages: list[Stage], base: Path) -> dict[str, Path]:
    """Carry out the instructions. Returns the root of each stage, by name."""
    roots: dict[str, Path] = {}
    for stage in stages:
        root = roots[stage.name] = CACHE / f"stage-{stage.name}"
        _clone(base, root)
        _copied_in(root)
        for each in stage.instructions:
            if each.word == "COPY":
                print(f"   COPY {each.rest}", flush=True)
                _copy(each, root, roots)
            elif each.word == "RUN":
                print(f"   RUN {each.rest[:90]}", flush=True)
                _must(command_in(root, ["/bin/sh", "-c", each.rest], environment=_network()), 900)
    return roots


def _must(command: list[str], seconds: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    if done.returncode != 0:
        raise Unavailable(f"{command[-1][:120]}: {(done.stdout + done.stderr).strip()[-1500:]}")
    return done.stdout


@contextlib.contextmanager
def _running(command: list[str], log: Path, line: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program, once it has said `line`; ended with the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd="/")
    try:
        wait_until(lambda: line in log.read_text() or process.poll() is not None, 60, f"{line} in {log}")
        if process.poll() is not None:
            raise Unavailable(f"{command[-3:]} ended: {log.read_text()[-1500:]}")
        yield process
    finally:
        process.terminate()
        process.wait(60)


def try_container(final: Stage, root: Path) -> None:
    """Serve a pool from the image's root as its user, and ask for its health as an engine would."""
    settings = root / "etc/g35"
    settings.mkdir(exist_ok=True)
    (settings / "agent.toml").write_text(CONFIGURATION.replace("KEY", "/var/lib/g35/root.key"))
    entry, command, health = final.last("ENTRYPOINT"), final.last("CMD"), final.last("HEALTHCHECK")
    assert entry is not None
    assert command is not None
    assert health is not None
    ask = Instruction("CMD", health.rest.partition(" CMD ")[2]).arguments()
    program = entry.arguments()
    enclosure = [
        sys.executable, "-P", "-m", "emulator.jbof", "--name", "shelf-1", "--port", str(PORT),
        "--drives", "2", "--drive-size", "512M",
    ]  # fmt: skip

    def as_user(*words: str) -> list[str]:
        return command_in(root, [*program, *words], user="g35:g35")

    with _running(enclosure, CACHE / "enclosure.log", "ready"):
        (root / "var/lib/g35/root.key").unlink(missing_ok=True)
        _must(as_user("key", "new", "/var/lib/g35/root.key"), 60)
        _must(as_user("pool", "format", "--config", "/etc/g35/agent.toml"), 60)
        with _running(as_user(*command.arguments()), CACHE / "container.log", "ready") as agent:
            inside = [
                "nsenter",
                f"--mount=/proc/{agent.pid}/ns/mnt",
                "chroot",
                "--userspec=g35:g35",
                str(root),
            ]
            print(f"   healthy: {len(_must([*inside, *ask], 30))} bytes of status", flush=True)
            _must([*inside, "/bin/sh", "-ec", _STORE_AND_SERVE], 60)
        print("   a value stored and served; ended in order", flush=True)


def try_service(base: Path, programs: Path) -> list[str]:
    """Boot a Debian with the units under systemd. Returns the lines of results."""
    root = CACHE / "service"
    _clone(base, root)
    _copied_in(root)
    packages = "systemd systemd-sysv dbus fuse3 python3 ibverbs-providers python3-pyverbs"
    install = f"apt-get update -q && apt-get install -y -q --no-install-recommends {packages}"
    _must(command_in(root, ["/bin/sh", "-c", install]), 600)
    shutil.copytree(programs, root / "opt/g35", symlinks=True)
    system, settings = root / "etc/systemd/system", root / "etc/g35"
    settings.mkdir()
    for unit in UNITS.glob("*.service"):
        shutil.copyfile(unit, system / unit.name)
    quick = system / "g35-agent.service.d"
    quick.mkdir()
    (quick / "trial.conf").write_text("[Service]\nWatchdogSec=4\n")
    key = "/run/credentials/g35-agent.service/root.key"
    (settings / "agent.toml").write_text(CONFIGURATION.replace("KEY", key))
    for_format = CONFIGURATION.replace("KEY", "/etc/g35/root.key").replace(
        "/var/lib/g35/agent", "/root/state"
    )
    (settings / "format.toml").write_text(for_format)
    (settings / "jbof-shelf-1.env").write_text(f"OPTIONS=--port {PORT} --drives 2 --drive-size 512M\n")
    (root / "root/trial.sh").write_text(_SERVICE_CHECKS)
    (system / "trial.service").write_text(_TRIAL_UNIT)
    wants = system / "default.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "trial.service").symlink_to("../trial.service")
    boot = [
        "systemd-nspawn",
        "--quiet",
        "--register=no",
        "--keep-unit",
        f"--directory={root}",
        "--bind=/dev/fuse",
    ]
    with (CACHE / "boot.log").open("wb") as log:
        subprocess.run(
            [*boot, "--machine=g35-trial", "--boot"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False, timeout=SERVICE_SECONDS,
        )  # fmt: skip
    told = (root / "var/trial.log").read_text()
    results = [line.removeprefix("RESULT ") for line in told.splitlines() if line.startswith("RESULT ")]
    if any(line.startswith("failed") for line in results):
        print(told)
    return results


def main() -> int:
    """Both trials, one after the other."""
    try:
        require(
            ("mmdebstrap", "mmdebstrap"), ("systemd-nspawn", "systemd-container"), ("unshare", "util-linux")
        )
        CACHE.mkdir(parents=True, exist_ok=True)
        base = CACHE / "base"
        if not base.exists():
            print("── a Debian 12, minbase", flush=True)
            make_root(base, ["ca-certificates"])
        print("── the container file, step by step", flush=True)
        stages = parse((UNITS / "Containerfile").read_text())
        roots = build(stages, base)
        print("── its command and its health check, as its user", flush=True)
        try_container(stages[-1], roots[stages[-1].name])
        print("── the units, under systemd", flush=True)
        results = try_service(base, roots[stages[-1].name] / "opt/g35")
    except Unavailable as why:
        print(f"make deploy: {why}", file=sys.stderr)
        return 1
    for line in results:
        print(f"   {line}")
    good = (
        bool(results)
        and "ok the enclosure ends" in results
        and all(line.startswith("ok") for line in results)
    )
    if good:
        for root in (*roots.values(), CACHE / "service"):
            shutil.rmtree(root)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
