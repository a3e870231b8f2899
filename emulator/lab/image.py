"""The files that QEMU boots: the kernel of a package, and an initramfs with modules and `init.sh`.

The initramfs is uncompressed: unpacking would be emulated, reading a few MiB more is not.
"""

import lzma
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from emulator.lab.cache import cache_folder, digest_of, only_one_preparation, publish_folder
from emulator.lab.errors import LabUnavailableError, last_lines
from emulator.lab.kernel import KernelPackage, Progress, kernel_package, require_programs
from emulator.lab.modules import LATER, WANTED, insertion_order

INIT_SCRIPT = Path(__file__).with_name("init.sh")

# Raise it when the way of building changes, and not only its ingredients.
BUILD_VERSION = 1

PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "dpkg-deb": "dpkg",
    "depmod": "kmod",
    "cpio": "cpio",
    "setpriv": "util-linux",
}


@dataclass(frozen=True, slots=True)
class LabImage:
    """A bootable pair of files, and the kernel's release as `uname -r` says it."""

    release: str
    kernel: Path
    initramfs: Path


def prepare(progress: Progress, *, refresh: bool = False) -> LabImage:
    """The image to boot; from the cache after the first time. Raises LabUnavailableError.

    `refresh` looks for a newer kernel instead of taking the cached one.
    """
    require_programs(PROGRAMS)
    cache = cache_folder()
    with only_one_preparation(cache):
        package = kernel_package(cache, progress, refresh=refresh)
        busybox = Path(shutil.which("busybox") or "busybox")
        stamp = digest_of(
            BUILD_VERSION.to_bytes(4, "little"),
            package.file.name.encode(),
            INIT_SCRIPT.read_bytes(),
            " ".join((*WANTED, *LATER)).encode(),
            busybox.read_bytes(),
        )

        def build(into: Path) -> None:
            progress(f"building the guest's initramfs for {package.release}")
            _build(package, busybox, into)

        folder = publish_folder(cache / "images" / f"{package.release}-{stamp}", build)
    return LabImage(package.release, folder / "vmlinuz", folder / "initramfs")


def _build(package: KernelPackage, busybox: Path, into: Path) -> None:
    with tempfile.TemporaryDirectory(dir=into.parent, prefix="unfinished-") as scratch_name:
        scratch = Path(scratch_name)
        tree, root = scratch / "package", scratch / "root"
        _run(["dpkg-deb", "-x", str(package.file), str(tree)])
        _run(["depmod", "-b", str(tree), package.release])
        shutil.copyfile(tree / "boot" / f"vmlinuz-{package.release}", into / "vmlinuz")
        _fill_root(root, tree / "lib" / "modules" / package.release, busybox)
        names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
        archive = _run(["cpio", "--quiet", "-o", "-H", "newc", "-R", "0:0"], names.encode(), cwd=root)
        (into / "initramfs").write_bytes(archive)


def _fill_root(root: Path, module_folder: Path, busybox: Path) -> None:
    for folder in ("bin", "modules", "proc", "sys", "dev", "lower", "layer", "root"):
        (root / folder).mkdir(parents=True)
    shutil.copyfile(busybox, root / "bin" / "busybox")
    (root / "bin" / "busybox").chmod(0o755)
    shutil.copyfile(INIT_SCRIPT, root / "init")
    (root / "init").chmod(0o755)
    at_boot = insertion_order(module_folder, WANTED)
    names: list[str] = []
    for file in insertion_order(module_folder, (*WANTED, *LATER)):
        content = (module_folder / file).read_bytes()
        if file.suffix == ".xz":
            content, file = lzma.decompress(content), file.with_suffix("")
        (root / "modules" / file.name).write_bytes(content)
        names.append(file.name)
    # What comes later depends on what was inserted at boot, never the other way round.
    for list_name, listed in (("order", names[: len(at_boot)]), ("later", names[len(at_boot) :])):
        (root / "modules" / list_name).write_text("\n".join(listed) + "\n")


def _run(command: list[str], stdin: bytes = b"", cwd: Path | None = None) -> bytes:
    done = subprocess.run(command, input=stdin, capture_output=True, cwd=cwd, check=False)
    if done.returncode != 0:
        raise LabUnavailableError(
            f"{command[0]} failed: {last_lines(done.stderr.decode(errors='replace'), 4)}"
        )
    return done.stdout
