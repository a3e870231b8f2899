"""The parts of the lab that need no QEMU: cache, module order, command lines, the choice of accelerator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from emulator.lab import accelerator
from emulator.lab.cache import cache_folder, digest_of, only_one_preparation, publish_folder
from emulator.lab.errors import LabUnavailableError
from emulator.lab.gpu_host import GpuHostShape, mounting_script
from emulator.lab.image import LabImage
from emulator.lab.kernel import kernel_package, require_programs
from emulator.lab.machine import (
    FileSystemDevice,
    Hardware,
    guest_script,
    kernel_line,
    qemu_command,
    remove_left_overs,
)
from emulator.lab.modules import insertion_order, module_name

IMAGE = LabImage("6.12.1+deb12-amd64", Path("/k/vmlinuz"), Path("/k/initramfs"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("G35_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("G35_LAB_ACCEL", raising=False)
    return cache_folder()


def test_the_cache_is_where_the_environment_says(cache: Path, tmp_path: Path) -> None:
    assert cache == tmp_path / "cache" / "lab"
    assert cache.is_dir()


def test_a_half_made_folder_is_never_seen(tmp_path: Path) -> None:
    destination = tmp_path / "images" / "one"

    def fails(folder: Path) -> None:
        (folder / "half").write_text("half")
        assert not destination.exists()
        raise RuntimeError("power cut")

    def works(folder: Path) -> None:
        (folder / "whole").write_text("whole")

    with pytest.raises(RuntimeError):
        publish_folder(destination, fails)
    assert list(destination.parent.iterdir()) == []

    # What a killed attempt leaves behind goes with the next one.
    (destination.parent / "unfinished-abc").mkdir()
    publish_folder(destination, works)
    assert [path.name for path in destination.parent.iterdir()] == ["one"]
    assert (destination / "whole").read_text() == "whole"

    publish_folder(destination, fails)  # it is there: nothing is made again


def test_the_digest_tells_ingredients_apart() -> None:
    assert digest_of(b"ab", b"c") != digest_of(b"a", b"bc")
    assert digest_of(b"ab", b"c") == digest_of(b"ab", b"c")


def test_only_one_process_prepares(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from emulator.lab.cache import only_one_preparation\n"
        "with only_one_preparation(Path(sys.argv[1])): print('in', flush=True)"
    )
    with only_one_preparation(tmp_path):
        waiting = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)
    assert waiting.communicate(timeout=30)[0] == b"in\n"


def test_modules_come_after_what_they_need(tmp_path: Path) -> None:
    (tmp_path / "modules.dep").write_text(
        "kernel/a/nvme-tcp.ko.xz: kernel/a/nvme-fabrics.ko.xz kernel/a/nvme-core.ko.xz\n"
        "kernel/a/nvme-fabrics.ko.xz: kernel/a/nvme-core.ko.xz\n"
        "kernel/a/nvme-core.ko.xz:\n"
    )
    (tmp_path / "modules.builtin").write_text("kernel/b/virtio_pci.ko\n")
    order = insertion_order(tmp_path, ["virtio_pci", "nvme_tcp", "nvme_core"])
    assert [module_name(str(file)) for file in order] == ["nvme_core", "nvme_fabrics", "nvme_tcp"]
    with pytest.raises(KeyError):
        insertion_order(tmp_path, ["nonesuch"])


def test_a_missing_program_is_named_with_its_package() -> None:
    require_programs({"sh": "dash"})
    with pytest.raises(LabUnavailableError, match="apt-get install qemu-x"):
        require_programs({"sh": "dash", "no-such-qemu": "qemu-x"})


def test_the_cached_kernel_needs_no_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LabUnavailableError, match="apt-cache"):
        kernel_package(tmp_path, print)
    name = "linux-image-6.12.95+deb12-amd64"
    file = tmp_path / "kernels" / f"{name}_1" / f"{name}_6.12.95-1_amd64.deb"
    file.parent.mkdir(parents=True)
    file.touch()
    found = kernel_package(tmp_path, print)
    assert (found.release, found.file) == ("6.12.95+deb12-amd64", file)


def test_the_guests_script_is_safe_for_the_shell() -> None:
    script = guest_script(["printf", "%s", "a'b $x"], Path("/some folder"))
    done = subprocess.run(
        ["sh", "-c", script.replace("/some folder", "/").replace("/run/g35/begun", "/dev/null")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "a'b $x"
    assert "cd '/some folder' || exit 125\n" in script
    assert "export LANG=C.UTF-8\n" in script
    assert guest_script("exit 3", Path("/")).endswith("\nexit 3\n")
    assert script.startswith(": > /run/g35/begun\n"), "so that a kernel's death can be told from its own"
    told = guest_script("exit 3", Path("/"), interactive=True)
    assert told.startswith(": > /run/g35/begun; echo\n"), "before anything of it can be seen"


def test_the_machines_root_is_shared_read_only() -> None:
    command = qemu_command(IMAGE, "tcg", Path("/tmp/a,b"), Path("/tmp/console"), Hardware())
    shares = [command[at + 1] for at, word in enumerate(command) if word == "-virtfs"]
    assert shares == [
        "local,path=/,mount_tag=machine,security_model=none,multidevs=remap,readonly=on",
        "local,path=/tmp/a,,b,mount_tag=exchange,security_model=none,multidevs=remap",
    ]


def test_the_kernel_boots_on_one_core() -> None:
    assert kernel_line(2, shell=False) == "console=ttyS0 quiet panic=-1 maxcpus=1 noreplace-smp"
    assert kernel_line(1, shell=True) == "console=ttyS0 quiet panic=-1 lab.shell"


def test_a_file_system_device_gets_a_socket_and_memory_that_can_be_shared() -> None:
    hardware = Hardware(memory_mib=768, cores=3, devices=(FileSystemDevice("a,b", 9, 3, 512),))
    words = " ".join(qemu_command(IMAGE, "tcg", Path("/tmp"), Path("/tmp/console"), hardware))
    assert "-m 768M -smp 3" in words
    assert "-object memory-backend-memfd,id=memory,size=768M,share=on -machine memory-backend=memory" in words
    assert "-chardev socket,id=device0,fd=9" in words
    assert "vhost-user-fs-pci,chardev=device0,tag=a,,b,num-request-queues=3,queue-size=512" in words
    assert "-no-reboot" in words
    again = qemu_command(IMAGE, "tcg", Path("/tmp"), None, Hardware(reboots=True))
    assert "-no-reboot" not in again
    assert "memory-backend" not in " ".join(again)


def test_the_gpu_hosts_script_mounts_first(tmp_path: Path) -> None:
    mount = tmp_path / "a b"
    (tmp_path / "mount").write_text('#!/bin/sh\necho "mounted $*"\n')
    (tmp_path / "mount").chmod(0o755)
    script = mounting_script(["printf", "%s", "a'b"], GpuHostShape(tag="t g", mount=str(mount)))
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env=path)
    assert done.stdout == f"mounted -t virtiofs t g {mount}\na'b"
    (tmp_path / "mount").write_text("#!/bin/sh\nexit 32\n")
    assert subprocess.run(["sh", "-c", script], capture_output=True, check=False, env=path).returncode == 125
    assert mounting_script("exit 3", GpuHostShape(mount="")) == "exit 3"


def test_what_was_started_by_somebody_who_is_gone_does_not_begin() -> None:
    for parent, said in ((os.getpid(), "begun\n"), (os.getppid(), "")):
        done = subprocess.run(
            [*accelerator.ENDS_WITH_US, str(parent), "echo", "begun"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == said


def test_folders_of_dead_owners_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, alive, other = (
        tmp_path / f"g35-lab-{ended.pid}-x",
        tmp_path / f"g35-lab-{os.getpid()}-x",
        tmp_path / "g35-lab-notes-x",
    )
    for folder in (dead, alive, other):
        folder.mkdir()
    remove_left_overs(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive, other])


def test_kvm_is_tried_once_and_its_verdict_kept(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, tries = tmp_path / "kvm", list[float]()
    assert accelerator.choose_accelerator(IMAGE, device) == "tcg", "there is no device"
    device.touch()

    def hangs(image: LabImage, options: tuple[str, ...], timeout_s: float) -> bool:
        tries.append(timeout_s)
        return False

    monkeypatch.setattr(accelerator, "guest_boots", hangs)
    assert accelerator.choose_accelerator(IMAGE, device) == "tcg"
    assert accelerator.choose_accelerator(IMAGE, device) == "tcg"
    assert tries == [accelerator.PROBE_TIMEOUT_S]
    (verdict,) = cache.glob("kvm-*.json")
    verdict.write_text(json.dumps({"accelerator": "kvm"}))
    assert accelerator.choose_accelerator(IMAGE, device) == "kvm"
    monkeypatch.setenv("G35_LAB_ACCEL", "tcg")
    assert accelerator.choose_accelerator(IMAGE, device) == "tcg"


def test_a_machine_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hanging = tmp_path / "qemu"
    hanging.write_text("#!/bin/sh\nexec sleep 1000\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(accelerator, "QEMU", str(hanging))
    assert accelerator.guest_boots(IMAGE, (), 0.3) is False
    hanging.write_text("#!/bin/sh\necho lab: booted\n")
    assert accelerator.guest_boots(IMAGE, (), 30) is True
