"""The GPU host: a guest with the virtio-fs device of a running agent, mounted.

    with gpu_host("ls /mnt/g35", socket_path, image=image) as guest:
        result = guest.wait(60)

On a DPU the agent runs on the card and the server sees a PCIe device; here the agent runs on this machine
and the guest sees one. Its kernel is Debian's as it is, its driver virtiofs.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from emulator.lab.cache import REPOSITORY
from emulator.lab.device_relay import DeviceRelay
from emulator.lab.image import LabImage
from emulator.lab.machine import FileSystemDevice, Guest, Hardware

QUEUE_SIZE = 1024
"""The most that virtio knows; 1 MiB is 256 pages, and four entries of a request are headers."""
CANNOT_MOUNT = 125
"""Exit status of a guest that could not mount the device: like that of one that has no such folder."""


@dataclass(frozen=True, slots=True)
class GpuHostShape:
    """Size of the machine, tag of the device, and its mount point (empty: none)."""

    memory_mib: int = 2048
    cores: int = 2
    tag: str = "g35"
    mount: str = "/mnt/g35"
    reboots: bool = False


@contextmanager
def gpu_host(
    command: Sequence[str] | str,
    socket_path: Path,
    *,
    image: LabImage,
    accelerator: str = "tcg",
    shape: GpuHostShape = GpuHostShape(),
    folder: Path = REPOSITORY,
    interactive: bool = False,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Iterator[Guest]:
    """One guest and its device. The end of the block ends the machine, then its device; the agent goes on.

    `command`, `folder` and `interactive` are as for `Guest`. Raises NoDeviceError where no agent listens at
    `socket_path`; nothing has been started then.
    """
    with DeviceRelay(socket_path, request_queues=shape.cores, queue_size=QUEUE_SIZE, tell=tell) as relay:
        device = FileSystemDevice(shape.tag, relay.qemu_end.fileno(), relay.request_queues, QUEUE_SIZE)
        with Guest(
            mounting_script(command, shape),
            image=image,
            accelerator=accelerator,
            folder=folder,
            interactive=interactive,
            hardware=Hardware(shape.memory_mib, shape.cores, (device,), shape.reboots),
        ) as guest:
            relay.qemu_end.close()  # QEMU has it; with QEMU the device shall end
            yield guest


def mounting_script(command: Sequence[str] | str, shape: GpuHostShape) -> str:
    """A shell script that mounts the device and then is the command."""
    after = command if isinstance(command, str) else f"exec {shlex.join(command)}"
    if not shape.mount:
        return after
    tag, mount = shlex.quote(shape.tag), shlex.quote(shape.mount)
    return (
        f"mkdir -p {mount} && mount -t virtiofs {tag} {mount} || "
        f"{{ echo 'the guest cannot mount the device' >&2; exit {CANNOT_MOUNT}; }}\n{after}"
    )
