"""KVM where it works, emulation (TCG) where it does not.

/dev/kvm alone says little: on some nested machines it opens and answers, and the first guest hangs. So a
guest is booted under KVM once, with a time-out, and the verdict is kept for this boot of this machine.
"""

import json
import os
import subprocess
from pathlib import Path

from emulator.lab.cache import cache_folder, digest_of
from emulator.lab.image import LabImage

# A guest that works boots in about a second, also on a slow machine.
PROBE_TIMEOUT_S = 8.0
BOOTED = b"lab: booted"

QEMU = "qemu-system-x86_64"
# The kernel ends the command behind these words and our process id when we are killed. If we are killed
# before setpriv has asked for that, we are no longer the parent, and nothing begins.
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL", "sh", "-c", '[ "$PPID" = "$0" ] && exec "$@"')
# Emulation runs `rep movsb` byte by byte, and vectors of 256 bits slower than those of 128: with `erms` and
# AVX the guest's kernel and C library copy at a third of the speed.
EMULATED_CPU = "max,-erms,-avx,-avx2"
ACCELERATOR_OPTIONS = {
    "kvm": ("-accel", "kvm", "-cpu", "host"),
    "tcg": ("-accel", "tcg,thread=multi", "-cpu", EMULATED_CPU),
}


def choose_accelerator(image: LabImage, device: Path = Path("/dev/kvm")) -> str:
    """`kvm` or `tcg`; $G35_LAB_ACCEL overrides."""
    forced = os.environ.get("G35_LAB_ACCEL")
    if forced in ACCELERATOR_OPTIONS:
        return forced
    if not os.access(device, os.R_OK | os.W_OK):
        return "tcg"
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    verdict_file = cache_folder() / f"kvm-{digest_of(boot, image.release.encode())}.json"
    try:
        verdict = json.loads(verdict_file.read_text())
    except (OSError, ValueError):
        works = guest_boots(image, ACCELERATOR_OPTIONS["kvm"], PROBE_TIMEOUT_S)
        verdict = {"accelerator": "kvm" if works else "tcg"}
        unfinished = verdict_file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(verdict))
        unfinished.rename(verdict_file)
    return "kvm" if verdict.get("accelerator") == "kvm" else "tcg"


def guest_boots(image: LabImage, options: tuple[str, ...], timeout_s: float) -> bool:
    """Boot the image as far as its first process. The QEMU process is gone when this returns."""
    command = [
        *(*ENDS_WITH_US, str(os.getpid()), QEMU, *options),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-m", "512M", "-net", "none"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initramfs)),
        *("-append", "console=ttyS0 quiet panic=-1 lab.probe", "-serial", "stdio"),
    ]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:  # run() has killed and reaped it
        return False
    return BOOTED in done.stdout
