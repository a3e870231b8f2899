"""`make arm64`: tests/unit and tests/pair on the architecture of a DPU, with qemu as its processor.

Three things are shown, in this order, and each ends the run where it fails: that every pinned package is
there for aarch64, as a wheel, or as source that builds there; that Debian's arm64 packages are (verbs, FUSE);
and that the tests pass under a Debian 12 of aarch64, run by qemu's user mode emulation. What is emulated are
the instructions alone: the kernel is this machine's.

Everything is kept in .cache/arm64, some 900 MB, and made anew when requirements.lock changes.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.deploy.debian_root import EMULATOR, Unavailable, command_in, make_root, require

REPOSITORY = Path(__file__).parents[3]
CACHE = REPOSITORY / ".cache/arm64"
PYTHON = "3.11"
"""Debian 12's, on which the tests run."""
ALSO_PYTHON = "3.12"
"""That of Ubuntu 24.04, which BlueField's software comes with by default; wheels are looked up, no more."""
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux2014_aarch64")
"""What glibc 2.28 and 2.17 run: Debian 12 has 2.36, Ubuntu 22.04 has 2.35."""
FROM_SOURCE = ("crcmod", "pyfuse3")
"""What no wheel exists of, for any Linux: C and Cython extensions, built on the machine."""
BUILD_REQUIREMENTS = ("setuptools_scm>=8", "Cython")
"""What building pyfuse3 takes beside what is pinned."""
PACKAGES = (
    "bash", "ca-certificates", "coreutils", "dash", "fuse3", "gcc", "grep", "ibverbs-providers", "iproute2",
    "libc-bin", "libfuse3-dev", "pkg-config", "procps", "python3-dev", "python3-pyverbs", "python3-venv",
    "rdmacm-utils", "util-linux",
)  # fmt: skip
"""Those of the agent, and what the tests of the two rungs call."""
_WHAT_RUNS = """
import platform, ssl, sys
import awscrt.checksums, crcmod._crcfunext, cryptography, isal.isal_zlib, numpy, pyfuse3
from nvmeof.transport.verbs_provider import load_verbs
load_verbs("pyverbs")
print("  ", platform.machine(), platform.python_version(), ssl.OPENSSL_VERSION)
"""
DEFAULT_TESTS = ("tests/unit", "tests/pair")


def pins(lock: Path, *, from_source: bool) -> list[str]:
    """The lines of requirements.lock: those that come as wheels, or those that are built."""
    lines = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    return [line for line in lines if (line.partition("==")[0] in FROM_SOURCE) is from_source]


def pip_words(python: str = PYTHON) -> list[str]:
    """pip's options for wheels of the other machine."""
    words = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    for platform in PLATFORMS:
        words += ["--platform", platform]
    return words


def _pip(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "-q", *words], capture_output=True, text=True, check=False, timeout=900
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise Unavailable("pip: " + "\n".join(lines[-4:]))


def fetch_packages(wheels: Path) -> int:
    """All that is pinned, for the other machine; returns how many files there are."""
    shutil.rmtree(wheels, ignore_errors=True)
    lock = REPOSITORY / "requirements.lock"
    folder = ["download", "--no-deps", "-d", str(wheels)]
    _pip(*folder, *pip_words(), *pins(lock, from_source=False))
    # What these need in turn is pinned too, where the lock names it: of one package there is one version.
    _pip("download", "-d", str(wheels), *pip_words(), "-c", str(lock), *BUILD_REQUIREMENTS)
    _pip(*folder, "--no-binary", ",".join(FROM_SOURCE), *pins(lock, from_source=True))
    nowhere = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--target", str(wheels / "nowhere")]
    _pip(*nowhere, *pip_words(ALSO_PYTHON), *pins(lock, from_source=False))
    return len(list(wheels.iterdir()))


def _inside(root: Path, wheels: Path, *command: str) -> list[str]:
    return command_in(
        root,
        command,
        binds={REPOSITORY: "/project", wheels: "/wheels"},
        environment={"PYTHONDONTWRITEBYTECODE": "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"},
        emulated=True,
    )


def _run(what: str, command: Sequence[str], seconds: float) -> None:
    began = time.monotonic()
    print(f"── {what}", flush=True)
    if subprocess.run(command, check=False, timeout=seconds).returncode != 0:
        raise Unavailable(f"{what}: failed (above)")
    print(f"   {time.monotonic() - began:.0f} s", flush=True)


def set_up() -> tuple[Path, Path]:
    """The root file system with a virtual environment in /venv, and the folder of wheels."""
    root, wheels, stamp = CACHE / "root", CACHE / "wheels", CACHE / "stamp"
    lock = (REPOSITORY / "requirements.lock").read_text()
    wanted = hashlib.sha256(repr((lock, PYTHON, PLATFORMS, PACKAGES, FROM_SOURCE)).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return root, wheels
    stamp.unlink(missing_ok=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    print("── every pinned package for aarch64", flush=True)
    print(f"   {fetch_packages(wheels)} files; from source: {', '.join(FROM_SOURCE)}", flush=True)
    print(f"── a Debian of arm64 with {', '.join(PACKAGES)}", flush=True)
    shutil.rmtree(root, ignore_errors=True)
    make_root(root, PACKAGES, architecture="arm64", extract=True)
    # Unpacked only, so what the packages' scripts would have linked is not there.
    if not (root / "bin/sh").exists():
        (root / "bin/sh").symlink_to("dash")
    (root / "root.pth").write_text("/project\n")
    pip = ("/venv/bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check")
    make = f"python{PYTHON} -m venv /venv && cp /root.pth /venv/lib/python{PYTHON}/site-packages/project.pth"
    _run("a virtual environment there", _inside(root, wheels, "sh", "-c", make), 300)
    ready = [str(Path("/wheels") / wheel.name) for wheel in sorted(wheels.glob("*.whl"))]
    _run("the wheels into it", _inside(root, wheels, *pip, "--no-deps", *ready), 900)
    built = pins(REPOSITORY / "requirements.lock", from_source=True)
    for line in built:
        _run(
            f"{line}, built there",
            _inside(root, wheels, *pip, "--no-deps", "--no-build-isolation", line),
            900,
        )
    stamp.write_text(wanted)
    return root, wheels


def main() -> int:
    """Exit code: that of pytest; 1 where something cannot be had, with a line that says what."""
    parser = argparse.ArgumentParser(prog="make arm64", description=__doc__)
    parser.add_argument("--set-up-only", action="store_true", help="run no tests")
    parser.add_argument("tests", nargs="*", default=DEFAULT_TESTS, help="what pytest is told")
    arguments, more = parser.parse_known_args()
    try:
        require(("mmdebstrap", "mmdebstrap"), (str(EMULATOR), "qemu-user-static"), ("unshare", "util-linux"))
        root, wheels = set_up()
        _run("what runs there", _inside(root, wheels, "/venv/bin/python", "-c", _WHAT_RUNS), 120)
    except Unavailable as why:
        print(f"make arm64: {why}", file=sys.stderr)
        return 1
    if arguments.set_up_only:
        return 0
    words = ["/venv/bin/python", "-m", "pytest", "--rootdir", "/project", "-c", "/project/pyproject.toml"]
    paths = [f"/project/{name}" if name.startswith("tests/") else name for name in arguments.tests]
    # Emulated instructions are 3 to 20 times slower; the limit of a test is meant for hangs.
    command = [*words, "--timeout", "1200", "-q", *more, *paths]
    return subprocess.run(_inside(root, wheels, *command), check=False, cwd="/").returncode


if __name__ == "__main__":
    sys.exit(main())
